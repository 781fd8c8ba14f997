"""The front's record of a request: its input, and the output that was sent."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvell.cluster.routed_request import InstanceDeath, RoutedRequest
from kvell.engine.protocol.logprobs import (
    KeptLogprobs,
    PromptLogprobs,
    TokenLogprobs,
    count_numbers,
)
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import to_token_bytes
from kvell.engine.requests.turns import Turn
from kvell.errors import Bound, ChangeSomething, TryLater
from kvell.vocabulary import FinishReason


@dataclass(frozen=True)
class Output:
    """New output of a request: token ids in order, and its end if it has come.

    :param logprobs: one for each token, if the request asked for them.
    :param prompt_logprobs: those of further prompt tokens in order, if the request asked for them.
    """

    token_ids: tuple[int, ...]
    finished: Finished | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class OutputRoom(Protocol):
    """The memory for a request's output until it is sent."""

    def grow(self, tokens: int, numbers: int) -> None:
        """Count tokens and log probabilities that are about to be kept.

        :raises TryLater: if there is no room for them.
        """
        ...

    def add_text(self, text: str) -> None:
        """Count a text that is kept.

        :raises TryLater: if there is no room for it.
        """
        ...


class Mailbox:
    """Tokens that arrived and were not read yet, merged.

    The sender never waits, so a slow reader cannot delay others.

    :param room: counts the output before it is kept; None: it is not counted.
    :param on_full: called once, when there is no room; the reader gets the error.
    """

    def __init__(
        self, room: OutputRoom | None = None, on_full: Callable[[], object] = lambda: None
    ) -> None:
        self._room, self._on_full = room, on_full
        self._refusal: TryLater | None = None
        self._token_ids: list[int] = []
        self._logprobs: KeptLogprobs | None = None
        self._prompt_logprobs: KeptLogprobs | None = None
        self._finished: Finished | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> None:
        """Append tokens; drop them if there is no room."""
        if self._refusal is not None:
            return
        if self._room is not None:
            try:
                self._room.grow(len(token_ids), count_numbers(logprobs) if logprobs else 0)
            except TryLater as refusal:
                self._refuse(refusal)
                return
        self._token_ids += token_ids
        if logprobs:
            self._logprobs = self._logprobs or KeptLogprobs()
            self._logprobs.extend(logprobs)
        if self._reader is not None:
            self._ring()

    def put_prompt(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Append log probabilities of prompt tokens, which are read with the first token."""
        self._prompt_logprobs = self._prompt_logprobs or KeptLogprobs()
        self._prompt_logprobs.extend(logprobs)

    def finish(self, finished: Finished) -> None:
        """End the output; only the first call counts."""
        if self._finished is None:
            self._finished = finished
            self._ring()

    async def take(self) -> Output:
        """Wait for output, and return all of it; for one reader.

        :raises TryLater: if there was no room for further output.
        """
        if not self._token_ids and self._finished is None and self._refusal is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._refusal is not None:
            raise self._refusal
        token_ids = tuple(self._token_ids)
        self._token_ids = []
        if self._logprobs is None and self._prompt_logprobs is None:
            return Output(token_ids, self._finished)
        logprobs = self._logprobs or ()
        self._logprobs = None
        prompt_logprobs = self._prompt_logprobs or ()
        self._prompt_logprobs = None
        return Output(token_ids, self._finished, logprobs, prompt_logprobs)

    def _refuse(self, refusal: TryLater) -> None:
        self._refusal = refusal
        self._token_ids = []
        self._logprobs = self._prompt_logprobs = None
        self._ring()
        self._on_full()

    def _ring(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # a reader that went away is cancelled
            reader.set_result(None)


@dataclass(frozen=True)
class EndedRequest:
    """A request that was admitted and has ended.

    :param seconds: time from arrival to end.
    :param line_seconds: of these, the time in the front's queue.
    :param output_tokens: number of tokens that were sent.
    :param max_tokens: most output tokens allowed; None without a limit.
    :param arrived_seconds: time of arrival, by the front's clock.
    :param first_token_seconds: time from arrival to the first token; None without a token.
    :param instance: last instance that had it; "" if none had it.
    :param predicted_seconds: time from arrival to the first token as predicted when its instance
        was chosen among several; None if there was no choice.
    """

    finished: Finished
    seconds: float
    line_seconds: float
    output_tokens: int
    max_tokens: int | None
    arrived_seconds: float = 0.0
    first_token_seconds: float | None = None
    instance: str = ""
    predicted_seconds: float | None = None


class RequestObserver(Protocol):
    """An observer of all requests (metrics)."""

    def first_tokens(self, seconds: float, count: int, prompt_tokens: int) -> None:
        """Handle a request's first ``count`` tokens, ``seconds`` after its arrival."""
        ...

    def next_tokens(self, seconds: float, count: int) -> None:
        """Handle ``count`` more tokens, ``seconds`` after those before."""
        ...

    def on_ended(self, request: EndedRequest) -> None:
        """Handle the end of an admitted request."""
        ...

    def on_rejected(self, bound: Bound) -> None:
        """Handle a request that was rejected, since it exceeded a bound."""
        ...

    def waits_idle(self) -> None:
        """Handle requests that wait for long though no instance has any."""
        ...


class RequestTrace(Protocol):
    """An observer of one request (tracing)."""

    def on_admitted(self) -> None:
        """Handle the admission of the request, whose end will follow."""
        ...

    def on_accepted(self) -> None:
        """Handle that an instance has accepted the request; an attempt that follows may repeat
        it."""
        ...

    def on_ended(self, request: EndedRequest) -> None:
        """Handle the end of the request."""
        ...


@dataclass
class LogEntry(RoutedRequest):
    """One request from its arrival to its end.

    :param prefix: prefix of the id that only instances see; see :class:`.RequestNames`.
    :param trace: the observer of the request.
    :param scored_tokens: prompt tokens whose log probabilities were sent; never the first token.
    :param end_as: the reason to report when the instance reports ``cancelled``.
    :param must_change: the reason to report with ``end_as``, if that is ``refused``.
    :param due_seconds: deadline of its answer, by the front's clock; None: there is none.
    :param early: tokens that arrived before those preceding them, since the instance that continues
        the request was received first; ``early_end`` is the end after them.
    """

    prefix: str = ""
    scored_tokens: int = 0
    submitted_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None
    end_as: FinishReason = "cancelled"
    must_change: ChangeSomething | None = None
    trace: RequestTrace | None = None
    due_seconds: float | None = None
    early: list[Tokens] = field(default_factory=list)
    early_end: Finished | None = None
    mailbox: Mailbox = field(default_factory=Mailbox)

    @property
    def shown_id(self) -> str:
        """Id of the request as the caller named it."""
        return self.request_id.removeprefix(self.prefix)

    @property
    def turn(self) -> Turn:
        return Turn.of(self.spec)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Token ids of its prompt and of its emitted tokens, int32."""
        return np.concatenate([self.spec.token_ids, np.frombuffer(self.output, np.int32)])

    @property
    def prompt_cost_tokens(self) -> int:
        """Tokens that its tenant is charged first; those with log probabilities count twice."""
        scored = self.prompt_tokens if self.spec.sampling.prompt_logprobs is not None else 0
        return self.prompt_tokens + len(self.output) + scored

    @property
    def has_gap(self) -> bool:
        """Whether tokens of this attempt arrived before those preceding them."""
        return any(event.attempt == self.attempt for event in self.early)

    def left_seconds(self, now: float) -> float | None:
        """Return the seconds until the first token is due; None if it came, or has no deadline."""
        if self.due_seconds is None or self.output:
            return None
        return self.due_seconds - now

    def to_record(self, finished: Finished, now: float) -> EndedRequest:
        """Return the record of the ended request."""
        submitted = now if self.submitted_seconds is None else self.submitted_seconds
        first, predicted = self.first_token_seconds, self.predicted
        in_line = submitted - self.arrived_seconds
        return EndedRequest(
            finished,
            now - self.arrived_seconds,
            in_line,
            len(self.output),
            None if self.spec.pooling else self.spec.sampling.max_tokens,
            self.arrived_seconds,
            None if first is None else first - self.arrived_seconds,
            self.line,
            None if predicted is None else in_line + predicted.seconds,
        )

    def submission(self) -> Submit:
        """Return the command that starts the current attempt."""
        return Submit(
            self.spec,
            self.attempt,
            to_token_bytes(np.frombuffer(self.output, np.int32)) if self.output else b"",
            self.goes_to,
            self.pulls_from,
            is_suspect=self.attempts.on_probation,
            placement=self.placement,
        )

    def take_tokens(self, event: Tokens) -> tuple[int, ...]:
        """Emit and return the new tokens, as far as all tokens before them have arrived."""
        if event.attempt != self.attempt:
            return ()
        if self.early and not self.has_gap:
            self.early.clear()  # of an earlier attempt
        if event.first_index > len(self.output):
            self.early.append(event)
            return ()
        emitted: tuple[int, ...] = ()
        reached: Tokens | None = event
        while reached is not None:
            seen = len(self.output) - reached.first_index
            fresh = reached.token_ids[seen:]
            if fresh:
                self.output.extend(fresh)
                self.attempts.on_probation = False
                self.mailbox.put(fresh, reached.logprobs[seen:])
                emitted += fresh
            follows = self.early and self.early[0].first_index <= len(self.output)
            reached = self.early.pop(0) if follows else None
        return emitted

    def take_scores(self, event: PromptLogprobs) -> None:
        fresh = event.logprobs[max(0, self.scored_tokens - event.first_index + 1) :]
        self.scored_tokens += len(fresh)
        self.mailbox.put_prompt(fresh)

    def end_with(self, event: Finished) -> Finished | None:
        """Return the end of a request as its instance reports it; None if it is retried."""
        if event.step_failed == "suspect":
            return self.end_after(InstanceDeath(event.message, "step"), sole=False)
        again = event.not_taken or event.reason == "moved" or event.step_failed
        if again and not self.is_dropped:
            return None
        is_unsaid = event.reason in ("cancelled", "moved") or event.step_failed
        if not is_unsaid:
            return event
        event = replace(event, reason=self.end_as)
        return event if self.must_change is None else _refused(event, self.must_change)

    def end_after(self, death: InstanceDeath, *, sole: bool) -> Finished | None:
        """Return the end of a request whose instance died; None if it is retried.

        :param sole: whether the instance had no other request.
        """
        if self.is_dropped:
            end = self.failure("", self.end_as)
            return end if self.must_change is None else _refused(end, self.must_change)
        if death.cause == "closing":
            return self.failure(death.problem)
        refusal = self.attempts.after(death.cause, sole=sole)
        return self.failure(f"{death.problem}; {refusal}") if refusal else None

    def refusal(self, problem: ChangeSomething) -> Finished:
        return _refused(self.failure(""), problem)

    def failure(self, message: str, reason: FinishReason = "error") -> Finished:
        """Return the end of this request, if its instance cannot report it."""
        return Finished(
            self.request_id,
            self.attempt,
            reason,
            prompt_tokens=self.prompt_tokens,
            output_tokens=len(self.output),
            message=message,
        )


def _refused(finished: Finished, problem: ChangeSomething) -> Finished:
    return replace(finished, reason="refused", message=str(problem), field=problem.field)
