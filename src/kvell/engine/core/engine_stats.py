"""Counters and gauges of an engine core, for its reports."""

from collections.abc import Mapping

from kvell.engine.core.miss_watch import MissWatch
from kvell.engine.lending.copy_cost import CopyCost
from kvell.engine.lending.memory_demand import memory_demand
from kvell.engine.moving.pool_part import PoolPart
from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.protocol.statistics import GroupStats, LoadStats, Stats
from kvell.engine.requests.counting import DraftTokens, StepSizes, TeamCounts, pages_bytes
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.requests.request import Request
from kvell.memory import MemoryCore, PoolTotals
from kvell.vocabulary import FinishReason, RequestId, StepNumber


class EngineStats:
    """The counters and gauges of one engine core.

    :param misses: over the same memory core; None: reasons of prefix misses are not recorded.
    :ivar output_tokens: number of tokens generated so far.
    :ivar team: counters of the threads that compute steps.
    """

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
        """Count a planned step, and the prompts of requests that run for the first time.

        :param requests: all requests of this engine by id.
        """
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
                self._misses.on_admitted(request, plan.step, self._scheduler.running)

    def count_result(self, plan: StepPlan, result: StepResult) -> None:
        """Count the threads of a step, and what copies added to it."""
        self.team.add(result.team)
        if result.team is not None:
            seconds = result.team.thread_seconds / max(1, result.team.threads)
            is_decode = all(work.known == 1 and work.output_index for work in plan.work)
            copied, is_copying = self._pool.copies
            self._copy_cost.on_step(
                seconds, is_decode=is_decode, copied=copied, is_copying=is_copying
            )

    def count_end(self, reason: FinishReason) -> None:
        self._finished[reason] = self._finished.get(reason, 0) + 1

    @property
    def num_decoding(self) -> int:
        return sum(1 for request in self._scheduler.running if request.is_decoding)

    @property
    def num_waiting(self) -> int:
        """Number of requests that hold no pages: queued or parked."""
        parking = self._scheduler.parking
        return len(self._scheduler.waiting) + (len(parking.parked) if parking else 0)

    def load_stats(self, step: StepNumber, *, outside: int = 0) -> LoadStats:
        """Return the load now; it counts the pool, so it is too slow for every step.

        :param outside: number of requests that wait before they enter the core.
        """
        totals = self._memory.totals()
        layout = self._memory.layout
        running = self._scheduler.running
        return LoadStats(
            step=step,
            running=len(running) + self._scheduler.num_offloaded,
            waiting=self.num_waiting + outside,
            large_pages=layout.num_large_pages,
            empty_large_pages=totals.empty_large,
            free_bytes=layout.pool_bytes - pages_bytes(totals.used_pages, layout.groups),
            pool_bytes=layout.pool_bytes,
            placements=self._pool.placements(),
            held_tokens=sum(request.computed for request in running),
            waiting_tokens=sum(request.num_tokens for request in self._scheduler.waiting),
            longest=self._pool.longest(running),
            copy_seconds=self._copy_cost.section_seconds,
            cached_bytes=pages_bytes(totals.cached_pages, layout.groups),
            **memory_demand(self._scheduler, layout)._asdict(),
        )

    @property
    def prefix_waits(self) -> int:
        return self._scheduler.rungs["wait_for_prefix"]

    def stats(self, step: StepNumber) -> Stats:
        """Return the gauges now and the counters so far."""
        totals = self._memory.totals()
        layout = self._memory.layout
        scheduler = self._scheduler
        return Stats(
            incarnation=self._incarnation,
            step=step,
            running=len(scheduler.running) + scheduler.num_offloaded,
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
            protected_prefixes=scheduler.protected.prefixes,
            protected_tokens=scheduler.protected.tokens,
            spec_decode_drafts=self.draft_tokens.drafts,
            spec_decode_draft_tokens=self.draft_tokens.draft_tokens,
            spec_decode_accepted_tokens=self.draft_tokens.accepted_tokens,
            spec_decode_accepted_by_position=self.draft_tokens.accepted_by_position(),
            step_tokens=self._step_sizes.tokens,
            steps_by_size=self._step_sizes.by_size(),
            large_page_bytes=layout.large_page_bytes,
            groups=self._group_stats(totals),
            memory=scheduler.memory.figures(),
            buffer=self._buffer(),
            misses={} if self._misses is None else self._misses.counts,
            team=self.team.figures(),
            sections=self._pool.sections(),
        )

    def _rungs(self, totals: PoolTotals) -> dict[str, int]:
        swapping, parking = self._scheduler.swapping, self._scheduler.parking
        offloaded = self._scheduler.offloaded
        return {
            **totals.rungs,
            **self._scheduler.rungs,
            **self._scheduler.memory.rungs,
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
