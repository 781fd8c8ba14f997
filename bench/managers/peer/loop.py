"""The loop of ``kvell replay`` around another memory manager.

All requests wait at the start.  A step computes at most ``max_batched_tokens`` tokens of at
most ``max_running`` requests: decodes first, then prefill chunks in order of admission, then
admissions, first come first served.  A request is admitted only if its whole remaining prompt
fits now, and none in a step that preempted.  Who is admitted last is preempted first, loses its
pages and waits in front.  Hits count at first admission.

The manager does what it wants inside its calls, and only that time counts; the loop asks it for
one request after the other, since that is the interface that vLLM's manager has.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.managers.peer.job import PeerJob
from bench.managers.peer.requests import Row, TokenMaker

AHEAD_REQUESTS = 4
"""Requests are made shortly before they can be admitted: their lists of tokens are long."""


@dataclass
class Counts:
    """What a run adds up."""

    finished: int = 0
    steps: int = 0
    request_steps: int = 0
    scheduled: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    saturated_steps: int = 0
    saturated_request_steps: int = 0
    short_of_memory_steps: int = 0
    batch_most: int = 0


@dataclass
class StepPlan:
    """Tokens of each request in a step, in the order in which they were planned."""

    budget: int
    tokens: dict[Any, int] = field(default_factory=dict)
    preempted: set[Any] = field(default_factory=set)

    def add(self, request: Any, tokens: int) -> None:
        """Compute so many tokens of it."""
        self.tokens[request] = tokens
        self.budget -= tokens

    def forget(self, request: Any) -> None:
        """It is preempted, perhaps after it was planned."""
        self.preempted.add(request)
        self.budget += self.tokens.pop(request, 0)


class Loop:
    """One replay over one manager, which has the calls of ``pool.VllmPool``."""

    def __init__(
        self,
        manager: Any,
        rows: Sequence[Row],
        job: PeerJob,
        on_computed: Callable[[Sequence[Any]], None] = lambda _: None,
    ) -> None:
        self.counts = Counts()
        self.running: list[Any] = []
        self.waiting: deque[Any] = deque()
        self._manager, self._job, self._on_computed = manager, job, on_computed
        self._tokens = TokenMaker(rows)
        self._pending: Iterator[tuple[int, Row]] = iter(enumerate(rows))
        self._outputs: dict[Any, int] = {}
        self._arrive()

    def run(self, progress: Callable[[int], None] = lambda _: None) -> Counts:
        """Until all is finished.

        :raises RuntimeError: if a request never fits.
        """
        while self.waiting or self.running:
            self._step()
            progress(self.counts.finished)
        return self.counts

    def _arrive(self) -> None:
        while len(self.waiting) < AHEAD_REQUESTS:
            following = next(self._pending, None)
            if following is None:
                return
            index, row = following
            request = self._manager.make(index, row, self._tokens.prompt(row))
            self._outputs[request] = row.output_tokens
            self.waiting.append(request)

    # ---------------------------------------------------------------------- plan

    def _step(self) -> None:
        self._arrive()
        plan = StepPlan(self._job.max_batched_tokens)
        self._manager.begin_step()
        self._plan_running(plan)
        if not plan.preempted:
            self._plan_waiting(plan)
        if not plan.tokens:
            raise RuntimeError("a step computes nothing: a request never fits")
        self._manager.end_plan()
        self._count(plan)
        for request, tokens in plan.tokens.items():
            request.num_computed_tokens += tokens
        self._manager.end_step()
        self._on_computed(self.running)
        for request in plan.tokens:
            self._take_token(request)

    def _plan_running(self, plan: StepPlan) -> None:
        for request in self._in_order():
            if plan.budget <= 0:
                return
            if request not in plan.preempted:
                self._plan_one(request, plan)

    def _in_order(self) -> Iterable[Any]:
        prefills = [request for request in self.running if not is_decoding(request)]
        return [*filter(is_decoding, self.running), *prefills]

    def _plan_one(self, request: Any, plan: StepPlan) -> None:
        wanted = min(request.num_tokens - request.num_computed_tokens, plan.budget)
        tokens = self._manager.chunk(request, wanted, 0)
        if not tokens:
            return
        while not self._manager.grow(request, tokens):
            victim = self.running.pop()
            self._preempt(victim, plan)
            if victim is request:
                return
        plan.add(request, tokens)

    def _preempt(self, victim: Any, plan: StepPlan) -> None:
        plan.forget(victim)
        self._manager.release(victim, preempted=True)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.counts.preemptions += 1
        self.waiting.appendleft(victim)

    def _plan_waiting(self, plan: StepPlan) -> None:
        while self.waiting and plan.budget > 0 and len(self.running) < self._job.max_running:
            request = self.waiting[0]
            if not self._admit(request, plan):
                return
            self.waiting.popleft()
            self.running.append(request)
            self._arrive()

    def _admit(self, request: Any, plan: StepPlan) -> bool:
        found, hit_tokens = self._manager.look_up(request)
        wanted = min(request.num_tokens - hit_tokens, plan.budget)
        tokens = self._manager.chunk(request, wanted, hit_tokens)
        alone = not self.running
        if not tokens or not self._manager.admit(request, tokens, found, hit_tokens, alone):
            return False
        if not request.num_preemptions:
            self.counts.prompt_tokens += request.num_prompt_tokens
            self.counts.hit_tokens += hit_tokens
        request.num_computed_tokens = hit_tokens
        plan.add(request, tokens)
        return True

    # -------------------------------------------------------------------- commit

    def _count(self, plan: StepPlan) -> None:
        counts, batch = self.counts, len(self.running)
        counts.steps += 1
        counts.request_steps += batch
        counts.scheduled += len(plan.tokens)
        counts.computed_tokens += sum(plan.tokens.values())
        counts.batch_most = max(counts.batch_most, batch)
        if self.waiting:
            counts.saturated_steps += 1
            counts.saturated_request_steps += batch
            has_seats = batch < self._job.max_running
            counts.short_of_memory_steps += plan.budget > 0 and has_seats

    def _take_token(self, request: Any) -> None:
        if request.num_computed_tokens < request.num_tokens:
            return
        request.append_output_token_ids(self._tokens.unique(1)[0])
        if request.num_output_tokens < self._outputs[request]:
            return
        self._manager.release(request, preempted=False)
        self.running.remove(request)
        del self._outputs[request]
        self.counts.finished += 1


def is_decoding(request: Any) -> bool:
    """Return whether all but its newest token is computed."""
    left: int = request.num_tokens - request.num_computed_tokens
    return bool(request.num_output_tokens > 0 and left == 1)
