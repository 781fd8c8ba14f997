"""Requests as bytes, and what a client must be able to do with them."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from kvell.errors import KvellError

Endpoint = Literal["completions", "chat"]
PATHS: Mapping[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}


class Refused(KvellError):  # noqa: N818 - it is the request that is refused
    """A status that is not 200.

    :param message: what the server says, in one line.
    """

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message
        super().__init__(f"HTTP {status}: {message}")


class ConnectionFailed(KvellError):  # noqa: N818
    """No connection, or one that broke."""


class Client(Protocol):
    """Speaks HTTP; the fakes of tests speak it without a network."""

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body.

        :raises ConnectionFailed: if there is no answer.
        """
        ...

    def post(self, path: str, body: bytes) -> AsyncGenerator[tuple[float, bytes], None]:
        """The pieces of a streamed answer, each with the event loop's time of its coming.

        Closing it early closes the connection: the server sees a client that hung up.

        :raises Refused: if the status is not 200.
        :raises ConnectionFailed: if there is no connection, or it breaks.
        """
        ...


@dataclass(frozen=True)
class Wire:
    """How a request is written.

    :param ignore_eos: answers have exactly as many tokens as asked for, where the server can.
    :param extra: further fields of every body.
    """

    model: str
    endpoint: Endpoint = "completions"
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Where requests go."""
        return PATHS[self.endpoint]

    def body(self, prompt: Mapping[str, Any], output_tokens: int) -> bytes:
        """A request for a streamed answer of at most ``output_tokens``, greedy.

        :param prompt: the field that holds it, ``prompt`` or ``messages``.
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
