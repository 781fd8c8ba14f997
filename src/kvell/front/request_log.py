"""The front's record of a request: the truth about what was asked and what was sent out."""

from array import array
from dataclasses import dataclass, field, replace
from typing import Protocol, TypedDict

import numpy as np

from kvell.engine.protocol.logprobs import PromptLogprobs
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.pooling import Pooling
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.tensors import SentTensor
from kvell.engine.requests.turns import Turn
from kvell.errors import Bound
from kvell.fleet.instance.death import InstanceDeath
from kvell.front.mailbox import Mailbox
from kvell.front.retries import Attempts
from kvell.vocabulary import FinishReason, RequestId

MOST_OUTPUT_TOKENS = 512
"""Output tokens that are expected at most: many clients ask for all there is room for, and few
answers are that long."""


@dataclass(frozen=True)
class EndedRequest:
    """A request that was let in and is over.

    :param seconds: from its arrival to its end.
    :param line_seconds: of these in the front's line, before an instance had it.
    :param output_tokens: sent out.
    :param max_tokens: output tokens that were allowed; None if it did not say.
    :param arrived_seconds: when it came, by the front's clock.
    :param first_token_seconds: from then to its first token; None if it had none.
    :param instance: that had it last; "" if none had it.
    """

    finished: Finished
    seconds: float
    line_seconds: float
    output_tokens: int
    max_tokens: int | None
    arrived_seconds: float = 0.0
    first_token_seconds: float | None = None
    instance: str = ""


class RequestObserver(Protocol):
    """Someone who wants to know how requests fare (metrics)."""

    def first_tokens(self, seconds: float, count: int, prompt_tokens: int) -> None:
        """A request's first ``count`` tokens came so long after it."""
        ...

    def next_tokens(self, seconds: float, count: int) -> None:
        """``count`` more tokens came so long after those before."""
        ...

    def ended(self, request: EndedRequest) -> None:
        """A request that was let in is over."""
        ...

    def rejected(self, bound: Bound) -> None:
        """A request was not let in, since it exceeded a bound."""
        ...

    def waits_idle(self) -> None:
        """Requests have begun to wait for long though no instance has any."""
        ...


class RequestTrace(Protocol):
    """Someone who follows this one request (tracing)."""

    def admitted(self) -> None:
        """The request is let in, and its end will be told."""
        ...

    def ended(self, request: EndedRequest) -> None:
        """It is over."""
        ...


class RequestDetails(TypedDict, total=False):
    """What may be said of a request beside its prompt and its sampling."""

    model: str
    """Which of several; the instances' first if it is not named."""
    session: str
    """Requests of one session share prefixes; "" if it has none."""
    tensors: tuple[SentTensor, ...]
    """Of the prompt's images, from the model's processor."""
    priority: int
    """Lower ones are served first."""
    trace: RequestTrace | None
    """Follows the request to its end."""
    pooling: Pooling
    """Asks for the prompt's vector, which comes with ``finished``, and no tokens."""
    tenant: str
    """Tenants take turns; "" on a server without keys."""
    group: str
    """Requests that were asked for together; the groups of a tenant take turns."""


@dataclass
class LogEntry:
    """One request from its arrival to its end.

    :param prefix: of its id, which nobody but instances sees; see :class:`.RequestNames`.
    :param prompt: token ids as little-endian int32 bytes.
    :param output: tokens that went to the reader; the next attempt goes on behind them.
    :param model: which of several models; "" is the first.
    :param session: requests of one session share prefixes; "" if it has none.
    :param tensors: of the prompt's images, kept for another attempt.
    :param priority: lower ones are served first.
    :param tenant: whose it is; "" on a server without keys.
    :param group: requests that were asked for together; those of a tenant's groups take turns.
    :param line: the instance that has it, or had it last; "" before the first.
    :param goes_to: the instance that goes on with it once its prompt is computed, and that
        one's ``goes_to_incarnation``; "" if it stays.
    :param pulls_from: the instance that is asked for its history; "" for none.
    :param placement: where its KV cache lies if it is longer than its instance's memory.
    :param hit_tokens: that the instance had cached when it was chosen, as far as is known.
    :param pending_prompt_tokens: that the instance has still to compute, as far as is known, those
        of the hit included.
    :param pending_output_tokens: that the instance is expected to make yet.
    :param held_tokens: that its instance counts for it: its prompt and what it has emitted.
    :param scored_tokens: of the prompt, of which it was told how likely they are; never the first.
    :param end_as: the reason to report when the instance says ``cancelled``.
    :param is_dropped: whether the instance was told to cancel it.
    :param trace: is told that it was let in, and its end.
    :param pooling: what is wanted of the prompt in place of tokens; "" for nothing.
    :param due_seconds: when its answer is given up, by the front's clock; None: never.
    :param early: tokens that came before those in front of them: another instance, which goes on
        with it, was heard first; and ``early_end``, the end behind them.
    """

    request_id: RequestId
    prompt: bytes
    sampling: SamplingParams
    cache_salt: str
    arrived_seconds: float
    attempt: int = 0
    model: str = ""
    session: str = ""
    tensors: tuple[SentTensor, ...] = ()
    priority: int = 0
    line: str = ""
    prefix: str = ""
    goes_to: str = ""
    goes_to_incarnation: int = 0
    pulls_from: str = ""
    placement: tuple[RequestPlacementEntry, ...] = ()
    hit_tokens: int = 0
    pending_prompt_tokens: int = 0
    pending_output_tokens: int = 0
    held_tokens: int = 0
    scored_tokens: int = 0
    output: "array[int]" = field(default_factory=lambda: array("i"))
    submitted_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None
    end_as: FinishReason = "cancelled"
    is_dropped: bool = False
    trace: RequestTrace | None = None
    pooling: Pooling = ""
    tenant: str = ""
    group: str = ""
    due_seconds: float | None = None
    early: list[Tokens] = field(default_factory=list)
    early_end: Finished | None = None
    attempts: Attempts = field(default_factory=Attempts)
    mailbox: Mailbox = field(default_factory=Mailbox)

    @property
    def shown_id(self) -> str:
        """Id of the request as the caller named it."""
        return self.request_id.removeprefix(self.prefix)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt) // 4

    @property
    def turn(self) -> Turn:
        """Its party among the requests that wait."""
        return Turn(self.priority, self.tenant, self.group)

    @property
    def prompt_cost_tokens(self) -> int:
        """What its tenant is charged when it is begun; a token that is told about counts twice."""
        told = self.prompt_tokens if self.sampling.prompt_logprobs is not None else 0
        return self.prompt_tokens + self.emitted_tokens + told

    @property
    def emitted_tokens(self) -> int:
        """Tokens that went to the reader."""
        return len(self.output)

    @property
    def has_gap(self) -> bool:
        """Whether tokens of this attempt came before those in front of them."""
        return any(one.attempt == self.attempt for one in self.early)

    @property
    def expected_output_tokens(self) -> int:
        """Tokens that it may still make; a large bound is not taken for a promise."""
        most = self.sampling.max_tokens
        expected = MOST_OUTPUT_TOKENS if most is None else min(most, MOST_OUTPUT_TOKENS)
        return max(1, expected - len(self.output))

    def left_seconds(self, now: float) -> float | None:
        """Seconds until its first token is late; None if nobody waits for it, or it has come."""
        if self.due_seconds is None or self.output:
            return None
        return self.due_seconds - now

    def ended(self, finished: Finished, now: float) -> EndedRequest:
        """All there is to say of it."""
        submitted = now if self.submitted_seconds is None else self.submitted_seconds
        first = self.first_token_seconds
        return EndedRequest(
            finished,
            now - self.arrived_seconds,
            submitted - self.arrived_seconds,
            self.emitted_tokens,
            None if self.pooling else self.sampling.max_tokens,
            self.arrived_seconds,
            None if first is None else first - self.arrived_seconds,
            self.line,
        )

    def note_tokens(self, now: float) -> None:
        """Note when its first and its latest tokens came."""
        if self.first_token_seconds is None:
            self.first_token_seconds = now
        self.last_token_seconds = now

    def submission(self) -> Submit:
        """The command that starts the current attempt."""
        return Submit(
            self.request_id,
            self.prompt,
            self.sampling,
            self.cache_salt,
            self.attempt,
            model=self.model,
            output=np.frombuffer(self.output, np.int32).astype("<i4").tobytes(),
            tensors=self.tensors,
            priority=self.priority,
            pooling=self.pooling,
            goes_to=self.goes_to,
            pulls_from=self.pulls_from,
            tenant=self.tenant,
            group=self.group,
            is_suspect=self.attempts.on_probation,
            placement=self.placement,
        )

    def take_tokens(self, event: Tokens) -> tuple[int, ...]:
        """Tokens that were not seen yet and have all others in front of them, now emitted."""
        if event.attempt != self.attempt:
            return ()
        if self.early and not self.has_gap:
            self.early.clear()  # of an earlier attempt
        if event.first_index > self.emitted_tokens:
            self.early.append(event)
            return ()
        fresh = self._emitted(event)
        while self.early and self.early[0].first_index <= self.emitted_tokens:
            fresh += self._emitted(self.early.pop(0))
        return fresh

    def _emitted(self, event: Tokens) -> tuple[int, ...]:
        """The tokens of an event that were not seen yet, now in the mailbox."""
        seen = max(0, self.emitted_tokens - event.first_index)
        fresh = event.token_ids[seen:]
        self.output.extend(fresh)
        if fresh:
            self.attempts.on_probation = False
            self.mailbox.put(fresh, event.logprobs[seen:])
        return fresh

    def take_scores(self, event: PromptLogprobs) -> None:
        """Emit how likely tokens of the prompt are, without those that were told before."""
        if event.attempt != self.attempt:
            return
        fresh = event.logprobs[max(0, self.scored_tokens - event.first_index + 1) :]
        self.scored_tokens += len(fresh)
        self.mailbox.put_prompt(fresh)

    def end_with(self, event: Finished) -> Finished | None:
        """The end of a request as its instance told it; None if it is tried again."""
        if event.step_failed == "suspect":
            return self.end_after(InstanceDeath(event.message, "step"), sole=False)
        again = event.not_taken or event.reason == "moved" or event.step_failed
        if again and not self.is_dropped:
            return None
        is_unsaid = event.reason in ("cancelled", "moved") or event.step_failed
        reason = self.end_as if is_unsaid else event.reason
        return replace(event, reason=reason)

    def end_after(self, death: InstanceDeath, *, sole: bool) -> Finished | None:
        """The end of a request whose instance died; None if it is tried again.

        :param sole: whether the instance had no other.
        """
        if self.is_dropped:
            return self.failure("", self.end_as)
        if death.cause == "closing":
            return self.failure(death.problem)
        refusal = self.attempts.after(death.cause, sole=sole)
        return self.failure(f"{death.problem}; {refusal}") if refusal else None

    def failure(self, message: str, reason: FinishReason = "error") -> Finished:
        """The end of this request when its instance cannot say it any more."""
        return Finished(
            self.request_id,
            self.attempt,
            reason,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.emitted_tokens,
            message=message,
        )
