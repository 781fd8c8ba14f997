"""Bodies of requests, and the errors of their answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kvell.errors import KvellError

Endpoint = Literal["completions", "chat"]
PATHS: Mapping[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}


class RefusedResponse(KvellError):  # noqa: N818 - it is the request that is refused
    """A response with a status other than 200."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(f"HTTP {status}: {message}")


class ConnectionFailed(KvellError):  # noqa: N818
    """A connection that cannot be opened, or that broke."""


@dataclass(frozen=True)
class Wire:
    """A builder of requests' bodies.

    :param ignore_eos: whether to ask for answers of exactly the given length.
    :param extra: further fields of each body.
    """

    model: str
    endpoint: Endpoint = "completions"
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    def body(self, prompt: Mapping[str, Any], output_tokens: int) -> bytes:
        """Return a request for a greedy, streamed answer of at most ``output_tokens``.

        :param prompt: the field ``prompt`` or ``messages``, with its value.
        """
        fields = {
            "model": self.model,
            **prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode(fields | dict(self.extra))
