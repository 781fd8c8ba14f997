"""Commit of a step's result to its requests: tokens, vectors and logprobs."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
from msgspec import structs

from kvell.engine.core.engine_stats import EngineStats
from kvell.engine.failing.failures import (
    TOO_COMPLEX,
    end_without_scores,
    end_without_token,
    end_without_vector,
)
from kvell.engine.protocol.logprobs import PromptLogprobs
from kvell.engine.protocol.messages import Event, Finished, Tokens
from kvell.engine.requests.limits import ModelRules
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.requests.request import Request
from kvell.memory import MemoryCore
from kvell.vocabulary import FinishReason, StepNumber


@dataclass(frozen=True)
class StepInFlight:
    """A step whose result is pending, and the requests of its work."""

    plan: StepPlan
    requests: list[Request]


class StepsInFlight(deque[StepInFlight]):
    """Steps whose results are pending, in order."""

    def require(self, step: StepNumber) -> StepInFlight:
        """Return the oldest step.

        :raises ValueError: if that is not step number ``step``.
        """
        if not self or self[0].plan.step != step:
            raise ValueError(f"a result of step {step} was not asked for")
        return self[0]

    def has(self, request: Request) -> bool:
        return any(request is member for step in self for member in step.requests)

    @property
    def handles(self) -> set[int]:
        return {work.handle for step in self for work in step.plan.work}


class StepCommitter:
    """The committer of steps: appends tokens to requests, and publishes computed pages."""

    def __init__(
        self, memory: MemoryCore, rules: Mapping[str, ModelRules], counters: EngineStats
    ) -> None:
        self._memory, self._rules, self._counters = memory, rules, counters

    def take(
        self, step: StepInFlight, result: StepResult, tokens: list[tuple[int, ...]]
    ) -> list[Event]:
        """Commit a step's result, and return the events of its requests."""
        self._counters.count_result(step.plan, result)
        if result.missed:
            step = self._without_missed(step, result.missed, tokens)
        events = _take_scores(step, result) if result.scored else []
        if result.pooled:
            _take_vectors(step, result)
        taken = self._take_tokens(step, tokens)
        return events + (_with_logprobs(taken, step, result) if result.logprobs else taken)

    def _without_missed(
        self, step: StepInFlight, missed: Sequence[int], tokens: list[tuple[int, ...]]
    ) -> StepInFlight:
        counts = [work.handle not in missed for work in step.plan.work]
        for work, request in zip(step.plan.work, step.requests, strict=True):
            if work.handle in missed:
                request.settle(request.settled, work.samples)
                request.computed = request.settled
        tokens[:] = compress(tokens, counts)
        plan = replace(step.plan, work=tuple(compress(step.plan.work, counts)))
        return StepInFlight(plan, list(compress(step.requests, counts)))

    def _take_tokens(self, step: StepInFlight, tokens: list[tuple[int, ...]]) -> list[Event]:
        """Append each work's tokens to its request; advance and publish what is computed.

        Accepted draft tokens are computed already, except in models with states; the last token
        of each work is not.
        """
        plan, requests = step.plan, step.requests
        events: list[Event] = []
        draft_tokens: list[tuple[int, int]] = []
        newest: list[tuple[int, int]] = []
        for work, request, drawn in zip(plan.work, requests, tokens, strict=True):
            if len(drawn) == 1 and not work.proposed:  # the common case
                if request.finish_reason is None and drawn[0] < 0:
                    end_without_token(request, drawn[0])
                elif request.finish_reason is None:
                    events.append(self._take_token(request, drawn[0]))
                newest.append((work.handle, drawn[0]))
                request.repeats = 0
                request.settle(work.start + work.count, True)
                continue
            self._counters.draft_tokens.add(work.proposed, len(drawn) - 1)
            taken = self._take_until_end(request, drawn)
            events.extend(taken)
            kept = drawn[: len(taken)] or drawn  # a cancelled request takes none
            right = max(0, len(kept) - 1)
            request.repeats = right if self._rules[request.model].has_states else 0
            right -= request.repeats
            draft_tokens.extend((work.handle, token) for token in kept[:right])
            newest.extend((work.handle, token) for token in kept[right:])
            request.settle(work.start + work.known + right, work.samples)
        self._publish(step, draft_tokens, newest)
        return events

    def finish_reason(self, request: Request, token: int) -> FinishReason | None:
        """Return why a request ends with its last token; None if it continues."""
        sampling = request.sampling
        if token in sampling.stop_token_ids:
            return "stop"
        if not sampling.ignore_eos and token in self._rules[request.model].eos_token_ids:
            return "stop"
        return "length" if len(request.output) >= request.max_tokens else None

    def _publish(
        self,
        step: StepInFlight,
        draft_tokens: list[tuple[int, int]],
        newest: list[tuple[int, int]],
    ) -> None:
        handles = [work.handle for work in step.plan.work]
        settled = [request.settled for request in step.requests]
        if not all(request.is_published for request in step.requests):
            keeps = [request.is_published for request in step.requests]
            handles, settled = list(compress(handles, keeps)), list(compress(settled, keeps))
            draft_tokens = [pair for pair in draft_tokens if pair[0] in handles]
            newest = [pair for pair in newest if pair[0] in handles]
        self._append(draft_tokens)
        self._memory.advance(np.array(handles, np.int32), np.array(settled, np.int32))
        self._append(newest)

    def _append(self, tokens: list[tuple[int, int]]) -> None:
        if not tokens:
            return
        handles, ids = zip(*tokens, strict=True)
        self._memory.append(np.array(handles, np.int32), np.array(ids, np.int32))

    def _take_until_end(self, request: Request, tokens: tuple[int, ...]) -> list[Event]:
        events: list[Event] = []
        for token in tokens:
            if request.finish_reason is None and token < 0:
                end_without_token(request, token)
            elif request.finish_reason is None:
                events.append(self._take_token(request, token))
        return events

    def _take_token(self, request: Request, token: int) -> Event:
        index = len(request.output)
        request.output.append(token)
        self._counters.output_tokens += 1
        request.finish_reason = self.finish_reason(request, token)
        return Tokens(request.request_id, request.attempt, index, (token,))


def yields_of(plan: StepPlan, result: StepResult) -> list[tuple[int, ...]]:
    """Return the tokens that each work of the plan yields; none for an unfinished prefill.

    :raises ValueError: if the result's tokens are not those of the plan.
    """
    is_even = not result.counts and len(result.token_ids) == len(plan.work) == plan.num_logits
    if is_even and all(work.samples for work in plan.work):  # each yields one token
        return [(token,) for token in result.token_ids]
    yields = iter(result.by_work())
    limits = [work.num_draws for work in plan.work]
    tokens = [next(yields, ()) if limit else () for limit in limits]
    fits = all(
        min(1, limit) <= len(row) <= limit for row, limit in zip(tokens, limits, strict=True)
    )
    if not fits or any(yields):
        raise ValueError(f"the tokens of step {result.step} do not match its work")
    return tokens


def end_of(request: Request, kept_tokens: int) -> Finished:
    """Return the event that reports a request's end."""
    cached_tokens = min(request.cached_tokens or 0, len(request.prompt))
    return Finished(
        request.request_id,
        request.attempt,
        request.finish_reason or "error",
        len(request.prompt),
        len(request.output),
        cached_tokens,
        request.preemptions,
        message=request.problem,
        field=request.problem_field,
        step_failed=request.step_failed,
        embedding=request.embedding,
        cache_write_tokens=max(0, kept_tokens - cached_tokens),
        bound="grammar" if request.problem == TOO_COMPLEX else None,
        pulled_bytes=request.pulled_bytes,
        moved_bytes=request.moved_bytes if request.finish_reason == "moved" else 0,
    )


def _take_scores(step: StepInFlight, result: StepResult) -> list[Event]:
    """Report prompt logprobs; positions reported before a preemption are not repeated."""
    events: list[Event] = []
    for work, request in zip(step.plan.work, step.requests, strict=True):
        scores = result.scored.get(work.handle)
        if scores is None or request.finish_reason is not None:
            continue
        if not scores:
            end_without_scores(request)
        first = max(work.start + 1, request.scored)
        fresh = scores[first - work.start - 1 :]
        if fresh:
            request.scored = first + len(fresh)
            events.append(PromptLogprobs(request.request_id, request.attempt, first, fresh))
    return events


def _take_vectors(step: StepInFlight, result: StepResult) -> None:
    """End requests that have their prompt's vector; the token drawn with it is dropped."""
    for work, request in zip(step.plan.work, step.requests, strict=True):
        if work.handle in result.pooled and request.finish_reason is None:
            request.embedding = result.pooled[work.handle]
            request.finish_reason = "stop"
            if not request.embedding:
                end_without_vector(request)


def _with_logprobs(events: Sequence[Event], step: StepInFlight, result: StepResult) -> list[Event]:
    logprobs = {
        request.request_id: iter(result.logprobs[work.handle])
        for work, request in zip(step.plan.work, step.requests, strict=True)
        if work.handle in result.logprobs
    }
    return [
        structs.replace(event, logprobs=(next(logprobs[event.request_id]),))
        if isinstance(event, Tokens) and event.request_id in logprobs
        else event
        for event in events
    ]
