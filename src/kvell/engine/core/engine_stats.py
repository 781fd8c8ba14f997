"""Counters and gauges of an engine core, for its reports; pure.

The planner of loans reads two of them in each heartbeat: the memory that requests need beyond what
they have (:func:`growth_bytes`), and the time that a copied section adds to steps
(:class:`CopyCost`).
"""

from collections.abc import Mapping
from typing import NamedTuple

from kvell.engine.core.miss_watch import MissWatch
from kvell.engine.lending.distributed_request import full_groups
from kvell.engine.moving.pool_part import PoolPart
from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.protocol.statistics import GroupStats, LoadStats, Stats
from kvell.engine.requests.counting import DraftTokens, StepSizes, TeamCounts, pages_bytes
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.requests.request import Request
from kvell.memory import Layout, MemoryCore, PoolTotals, pages_of_text
from kvell.pages.rows import PageCountRow
from kvell.vocabulary import FinishReason, RequestId, StepNumber


class _Growth(NamedTuple):
    """The growth of one running request.

    :param steps: output tokens until its end.
    :param prompt_bytes: of the tokens that it has, but has not computed.
    :param token_bytes: of each further token.
    :param held_bytes: of the computed tokens, which its end frees.
    """

    steps: int
    prompt_bytes: int
    token_bytes: int
    held_bytes: int


def growth_bytes(scheduler: Scheduler, layout: Layout) -> int:
    """Return the most by which the memory of all running requests together will grow.

    Each computes the rest of its prompt, and then a token a step; when one ends, its memory serves
    the others.
    """
    rates = {
        model: _token_bytes(model, layout)
        for model in {request.model for request in scheduler.seats.running}
    }
    growths = sorted(_growth(scheduler, r, rates[r.model]) for r in scheduler.seats.running)
    growing_bytes = sum(growth.prompt_bytes for growth in growths)
    rate = sum(growth.token_bytes for growth in growths)
    most_bytes = freed_bytes = 0
    for growth in growths:
        most_bytes = max(most_bytes, growing_bytes + rate * growth.steps - freed_bytes)
        growing_bytes -= growth.prompt_bytes
        rate -= growth.token_bytes
        freed_bytes += growth.held_bytes
    return most_bytes


def _growth(scheduler: Scheduler, request: Request, token_bytes: int) -> _Growth:
    """Return a running request's growth; one with a placement has room here for all that stays."""
    prompt_tokens = max(0, request.end_for_now - request.computed)
    steps = 0 if request.local_tokens else scheduler.admission.expected_output(request)
    held_tokens = max(0, request.computed - request.remote_tokens)
    return _Growth(steps, prompt_tokens * token_bytes, token_bytes, held_tokens * token_bytes)


def _token_bytes(model: str, layout: Layout) -> int:
    groups = full_groups(model, layout.groups)
    return sum(group.page_stride_bytes // group.page_tokens for _, group in groups)


def _admission_bytes(request: Request, layout: Layout) -> int:
    """Return the memory that a waiting request needs to be admitted: of all its tokens here."""
    tokens = max(1, request.end_for_now - request.remote_tokens)
    pages = pages_of_text(layout, tokens, request.model)[:, PageCountRow.COUNT].tolist()
    return sum(
        count * group.page_stride_bytes for count, group in zip(pages, layout.groups, strict=True)
    )


FORGETTING = 1 / 16
"""Weight of the latest plain step in the usual time."""
LEAST_STEPS, LEAST_SECTIONS = 8, 4
"""Plain steps and copied sections without which nothing is reported."""
MOST_SECTIONS = 64
"""Beyond this number, earlier sections count half."""


class CopyCost:
    """The time that a copied section adds to an instance's steps, measured while it decodes.

    ::

        plain decode steps ──► their usual time ─┐
        decode steps with copies ──► their time ─┴─► the difference, over the copied sections

    A copy that is hidden by the computation adds nothing (Infinite-LLM's figure 12: 16 tokens a
    step).
    """

    def __init__(self) -> None:
        self._usual_seconds = self._added_seconds = self._sections = 0.0
        self._plain_steps = self._copied = 0
        self._was_copying = False

    @property
    def section_seconds(self) -> float | None:
        """The seconds that the copy of a section adds to steps; None: not measured yet."""
        if self._plain_steps < LEAST_STEPS or self._sections < LEAST_SECTIONS:
            return None
        return max(0.0, self._added_seconds / self._sections)

    def on_step(self, seconds: float, *, is_decode: bool, copied: int, is_copying: bool) -> None:
        """Process a step that has ended.

        :param seconds: of its passes.
        :param copied: sections that were copied to or from the instance so far.
        :param is_copying: whether more are being copied now.
        """
        sections = copied - self._copied
        is_plain = not (sections or is_copying or self._was_copying)
        self._copied, self._was_copying = copied, is_copying
        if not is_decode:
            return
        if is_plain:
            self._plain_steps += 1
            weight = max(FORGETTING, 1 / self._plain_steps)
            self._usual_seconds += weight * (seconds - self._usual_seconds)
        elif self._plain_steps >= LEAST_STEPS:
            self._added_seconds += seconds - self._usual_seconds
            self._sections += sections
            if self._sections > MOST_SECTIONS:
                self._added_seconds /= 2
                self._sections /= 2


class EngineStats:
    """The counters and gauges of one engine core."""

    def __init__(
        self,
        incarnation: int,
        memory: MemoryCore,
        scheduler: Scheduler,
        misses: MissWatch | None,
        pool: PoolPart,
    ) -> None:
        self._incarnation, self._memory = incarnation, memory
        self._scheduler, self._misses, self._pool = scheduler, misses, pool
        self.output_tokens = 0
        self.draft_tokens = DraftTokens()
        self.team = TeamCounts()
        self._copy_cost = CopyCost()
        self._step_sizes = StepSizes()
        self._group_hits = [0] * len(memory.layout.groups)
        self._prompt_tokens = self._hit_tokens = self._preemptions = 0
        self._finished = dict.fromkeys(("stop", "length", "cancelled", "refused"), 0)

    def count_plan(self, plan: StepPlan, requests: Mapping[RequestId, Request]) -> None:
        """Count a planned step, and the prompts of requests that run for the first time."""
        self._preemptions += len(plan.preempted)
        self._step_sizes.add(plan.num_tokens)
        for request_id in plan.admitted:
            request = requests[request_id]
            if request.preemptions or request.output:
                continue
            self._prompt_tokens += len(request.prompt)
            self._hit_tokens += request.cached_tokens or 0
            for group, tokens in enumerate(request.group_hits):
                self._group_hits[group] += tokens
            if self._misses is not None and self._scheduler.looks_up(request):
                self._misses.on_admitted(request, plan.step, self._scheduler.seats.running)

    def count_result(self, plan: StepPlan, result: StepResult) -> None:
        self.team.add(result.team)
        if result.team is not None:
            seconds = result.team.thread_seconds / max(1, result.team.threads)
            is_decode = all(
                work.count - work.proposed == 1 and work.output_index for work in plan.work
            )
            copied, is_copying = self._pool.copies
            self._copy_cost.on_step(
                seconds, is_decode=is_decode, copied=copied, is_copying=is_copying
            )

    def count_end(self, reason: FinishReason) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1

    @property
    def num_waiting(self) -> int:
        """Number of requests that hold no pages: queued or parked."""
        parking = self._scheduler.parking
        return len(self._scheduler.seats.waiting) + (len(parking.parked) if parking else 0)

    def load_stats(self, step: StepNumber, *, outside: int = 0) -> LoadStats:
        """Return the load now; it counts the pool, so it is too slow for every step."""
        totals = self._memory.totals()
        layout = self._memory.layout
        running = self._scheduler.seats.running
        borrowed = self._pool.borrowed
        head = self._scheduler.seats.waiting.first()
        return LoadStats(
            step=step,
            running=len(running) + len(self._scheduler.seats.offloaded),
            waiting=self.num_waiting + outside,
            large_pages=layout.num_large_pages,
            empty_large_pages=totals.empty_large,
            free_bytes=layout.pool_bytes - pages_bytes(totals.used_pages, layout.groups),
            pool_bytes=layout.pool_bytes,
            placements=() if borrowed is None else borrowed.placements(),
            held_tokens=sum(request.computed for request in running),
            waiting_tokens=sum(request.num_tokens for request in self._scheduler.seats.waiting),
            longest=() if borrowed is None else borrowed.longest(running),
            copy_seconds=self._copy_cost.section_seconds,
            cached_bytes=pages_bytes(totals.cached_pages, layout.groups),
            memory_waiting=self._scheduler.num_awaiting_memory,
            head_tokens=0 if head is None else head.num_tokens,
            head_bytes=0 if head is None else _admission_bytes(head, layout),
            answer_tokens=0 if head is None else self._scheduler.admission.expected_output(head),
            growth_bytes=growth_bytes(self._scheduler, layout),
        )

    def stats(self, step: StepNumber) -> Stats:
        totals = self._memory.totals()
        layout = self._memory.layout
        scheduler = self._scheduler
        return Stats(
            incarnation=self._incarnation,
            step=step,
            running=len(scheduler.seats.running) + len(scheduler.seats.offloaded),
            waiting=self.num_waiting,
            large_pages=layout.num_large_pages,
            empty_large_pages=totals.empty_large,
            kv_cache_usage=pages_bytes(totals.used_pages, layout.groups) / layout.pool_bytes,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self.output_tokens,
            prefix_cache_queries=self._prompt_tokens,
            prefix_cache_hits=self._hit_tokens,
            preemptions=self._preemptions,
            finished=dict(self._finished),
            rungs=self._rungs(totals),
            protected_prefixes=scheduler.chunks.protected.prefixes,
            protected_tokens=scheduler.chunks.protected.tokens,
            spec_decode_drafts=self.draft_tokens.drafts,
            spec_decode_draft_tokens=self.draft_tokens.draft_tokens,
            spec_decode_accepted_tokens=sum(self.draft_tokens.accepted),
            spec_decode_accepted_by_position=tuple(self.draft_tokens.accepted),
            step_tokens=self._step_sizes.tokens,
            steps_by_size=tuple(self._step_sizes.by_size),
            large_page_bytes=layout.large_page_bytes,
            groups=self._group_stats(totals),
            memory=scheduler.chunks.memory.figures(),
            buffer=self._buffer(),
            misses={} if self._misses is None else self._misses.log.counts,
            team=self.team.figures(),
            sections=self._pool.sections(),
        )

    def _rungs(self, totals: PoolTotals) -> dict[str, int]:
        swapping, parking = self._scheduler.swapping, self._scheduler.parking
        offloaded = self._scheduler.offloaded
        return {
            **totals.rungs,
            **self._scheduler.seats.rungs,
            **self._scheduler.chunks.memory.rungs,
            **(swapping.counters() if swapping else {}),
            **({"offload": parking.count} if parking else {}),
            **({"offload_prompt": offloaded.count} if offloaded else {}),
            "refuse": self._finished["refused"],
        }

    def _buffer(self) -> dict[str, int]:
        swapping, parking = self._scheduler.swapping, self._scheduler.parking
        if swapping is None:
            return {}
        if parking is None:
            return swapping.figures()
        return swapping.figures() | {
            "parked": len(parking.parked),
            "parkings": parking.count,
            "logical_large_pages": parking.sizes.logical_chunks,
        }

    def _group_stats(self, totals: PoolTotals) -> tuple[GroupStats, ...]:
        layout = self._memory.layout
        return tuple(
            GroupStats(
                group.name,
                totals.used_pages[index],
                totals.cached_pages[index],
                totals.evicted_pages[index],
                self._group_hits[index],
                totals.unwritten_pages[index],
                totals.stranded_pages[index],
                totals.checkpoint_pages[index],
                group.pages_per_large * layout.num_large_pages,
                group.page_tokens,
                group.page_stride_bytes,
            )
            for index, group in enumerate(layout.groups)
        )
