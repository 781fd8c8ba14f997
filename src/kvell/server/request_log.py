"""The front's record of a request: the truth about what was asked and what was sent out."""

from dataclasses import dataclass, field
from typing import Protocol

from kvell.engine.protocol import Finished, Submit, Tokens
from kvell.engine.sampling_params import SamplingParams
from kvell.server.mailbox import Mailbox
from kvell.vocabulary import FinishReason, RequestId


class RequestObserver(Protocol):
    """Someone who wants to know how requests fare (metrics)."""

    def first_token(self, seconds: float) -> None:
        """The first token came so long after the request."""
        ...

    def next_tokens(self, seconds: float, count: int) -> None:
        """``count`` more tokens came so long after those before."""
        ...

    def finished(self, finished: Finished, seconds: float, output_tokens: int) -> None:
        """A request ended after so long with so many tokens sent out."""
        ...


@dataclass
class LogEntry:
    """One request from its arrival to its end.

    :param prompt: token ids as little-endian int32 bytes.
    :param emitted_tokens: output positions that went to the reader; a re-run's
        repetitions of them are dropped.
    :param end_as: the reason to report when the instance says ``cancelled``.
    """

    request_id: RequestId
    prompt: bytes
    sampling: SamplingParams
    cache_salt: str
    arrived_seconds: float
    attempt: int = 0
    emitted_tokens: int = 0
    last_token_seconds: float | None = None
    end_as: FinishReason = "cancelled"
    mailbox: Mailbox = field(default_factory=Mailbox)

    def submission(self) -> Submit:
        """The command that starts the current attempt."""
        return Submit(self.request_id, self.prompt, self.sampling, self.cache_salt, self.attempt)

    def take_tokens(self, event: Tokens) -> tuple[int, ...]:
        """The tokens of an event that were not seen yet, now counted as emitted."""
        if event.attempt != self.attempt:
            return ()
        fresh = event.token_ids[max(0, self.emitted_tokens - event.first_index) :]
        self.emitted_tokens += len(fresh)
        return fresh

    def failure(self, message: str) -> Finished:
        """The end of this request when its instance cannot say it any more."""
        return Finished(
            self.request_id,
            self.attempt,
            "error",
            prompt_tokens=len(self.prompt) // 4,
            output_tokens=self.emitted_tokens,
            message=message,
        )
