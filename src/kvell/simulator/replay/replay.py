"""Replay of a trace in virtual time on the engine's own scheduler and memory core.

::

    trace ─► arrivals ─► EngineCore.plan ─► TraceRunner ─► EngineCore.commit ─► figures
                              ▲                │ seconds of the step
                              └─ VirtualClock ◄┘

No part of the engine is re-implemented; only the model's answers come from the trace.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvell.clock import Clock, VirtualClock
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, JournaledCore
from kvell.engine.core.lateness import LatenessWatch
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.planning.admission import MAX_HELD_BACK
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.protocol.messages import Event, Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec, to_token_bytes
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan
from kvell.memory import LayerSpec, MemoryCore
from kvell.pages.snapshot import PoolTotals
from kvell.simulator.replay.metered import MeteredCore
from kvell.simulator.replay.runner import Acceptance, StepTimer, TraceRunner
from kvell.simulator.replay.schedule import Arrivals, Schedule
from kvell.simulator.report.metrics import MemoryMeter, Sample, StepMeans
from kvell.simulator.report.timeline import GroupMoment, Moment, Timeline
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import TraceRow, place
from kvell.vocabulary import RequestId

Progress = Callable[[float], None]
"""Called with the fraction of requests that are done."""

MAX_NUM_BATCHED_TOKENS = 8_192
MAX_NUM_SEQS = 256
AHEAD_TOKENS = 1 << 23
"""Prompts are made shortly before admission: no more while this many tokens wait …"""
AHEAD_REQUESTS = 17
"""… in at least this many requests: as many as one step can hold back, and one more."""


@dataclass
class RequestFigures:
    """One request's life, in steps and virtual seconds; None for events that did not happen.

    ``prompt_tokens`` include those that stand for images. ``came_seconds`` is when the client sent
    it, the other times are when the first and the last token of its answer reached the client.
    """

    index: int
    prompt_tokens: int
    hit_tokens: int | None = None
    admitted_step: int | None = None
    first_token_step: int | None = None
    finish_step: int | None = None
    came_seconds: float | None = None
    first_token_seconds: float | None = None
    finish_seconds: float | None = None


class Replay:
    """One run of one trace; call :meth:`run` once, or :meth:`go_on` to the end, then read figures.

    :param core: an empty memory core.
    :param layers: the model's layers, which determine the tokens that are still needed.
    :param limits: ``max_model_len`` decides which requests are refused.
    :param machine: gives each step its duration in virtual time.
    :param wall: measures the duration of the replay itself.
    :param timeline: is offered every step.
    :param sessions: whether a turn waits for the one before it (see :class:`Schedule`).
    :param images_in_text: whether an image's tokens are tokens of the prompt.
    :param acceptance: decides which draft tokens are accepted, if ``limits`` allow any.
    :param memory: makes the sharing of the pool with activations, from the core.
    :param swapping: makes the CPU buffer, from the core.
    :param parking: makes the component that prefills ahead of decodes, from core and buffer.
    :param lateness: reports late requests to the engine, if given.
    :param look_every: number of steps between samples of the use of pages; memory figures stay the
        same in between.
    """

    def __init__(
        self,
        core: MemoryCore,
        layers: Sequence[LayerSpec],
        limits: Limits,
        rows: Sequence[TraceRow],
        arrivals: Arrivals,
        machine: StepTimer,
        wall: Clock,
        journal: Journal | None = None,
        *,
        timeline: Timeline | None = None,
        sessions: bool = True,
        images_in_text: bool = True,
        acceptance: Acceptance | None = None,
        memory: Callable[[MemoryCore], StepMemory] | None = None,
        swapping: Callable[[MemoryCore], Swapping] | None = None,
        parking: Callable[[MemoryCore, Swapping], Parking] | None = None,
        lateness: LatenessWatch | None = None,
        look_every: int = 1,
    ) -> None:
        self._placed = [place(row, images_in_text) for row in rows]
        self.requests = [
            RequestFigures(i, each.prompt_tokens) for i, each in enumerate(self._placed)
        ]
        self.means = StepMeans(core.layout)
        self.clock = VirtualClock()
        self._rows, self._machine, self._wall, self._timeline = rows, machine, wall, timeline
        self._memory = MeteredCore(core)
        self._memory.on_advanced = self._look
        self._meter = MemoryMeter(core.layout, layers)
        buffer = swapping and swapping(self._memory)
        self._engine = EngineCore(
            self._memory,
            limits,
            frozenset(),
            memory=memory and memory(self._memory),
            swapping=buffer,
            parking=parking(self._memory, buffer) if parking and buffer else None,
        )
        self._lateness = lateness
        self._look_every, self._seen = look_every, Sample(0, False, ())
        self._journaled = JournaledCore(self._engine, journal)
        self._prompts = PromptMaker(rows, images_in_text)
        self._runner = TraceRunner(self._prompts, acceptance)
        self._pending = Schedule(rows, arrivals, self._is_served, sessions=sessions)
        self._counts = dict.fromkeys(("finished", "scheduled", "short_of_memory"), 0)
        self._held_back = 0
        self._waiting_tokens = 0
        self._leaves_waiting = False
        self._wall_seconds = 0.0

    def run(self, progress: Progress = lambda _: None) -> None:
        """Run until every request is finished or refused."""
        while self.go_on():
            progress((self._counts["finished"] + len(self._pending.refused)) / len(self._rows))

    def go_on(self) -> bool:
        """Run at most one step; return False once every request is finished or refused.

        For callers that run several replays side by side.
        """
        if not len(self._pending) and not self._engine.has_work:
            return False
        began = self._wall.now_seconds()
        self._arrive()
        if self._engine.has_work:
            self._step()
        self._wall_seconds += self._wall.now_seconds() - began
        return True

    @property
    def requests_refused(self) -> int:
        """Number of requests that could not be served."""
        return len(self._pending.refused)

    def totals(self) -> PoolTotals:
        """Return the counters of the memory core."""
        return self._memory.totals()

    def report(self) -> dict[str, Any]:
        """Return the figures of the run under the names that every bench uses."""
        stats, steps = self._engine.stats(), self._engine.step
        every, saturated = self.means.means(), self.means.means(saturated=True)
        manager_us = self._memory.nanoseconds / 1e3
        groups = [
            figures | {"evicted_pages": group.evicted_pages, "hit_tokens": group.hit_tokens}
            for figures, group in zip(self.means.group_figures(), stats.groups, strict=True)
        ]
        return {
            "requests_finished": self._counts["finished"],
            "requests_refused": self.requests_refused,
            "steps": steps,
            "batch_mean": every.batch,
            "hit_rate": stats.prefix_cache_hits / max(1, stats.prefix_cache_queries),
            "waste": every.waste,
            "stranded": every.stranded,
            "manager_us_per_step": manager_us / max(1, steps),
            "manager_us_per_request_step": manager_us / max(1, self._counts["scheduled"]),
            "short_of_memory": self._counts["short_of_memory"] / max(1, steps),
            "preemptions": stats.preemptions,
            "protected_prefixes": stats.protected_prefixes,
            "protected_tokens": stats.protected_tokens,
            "kv_memory_bytes": self._memory.layout.pool_bytes,
            "wall_seconds": self._wall_seconds,
            "batch_saturated_mean": saturated.batch,
            "waste_saturated": saturated.waste,
            "stranded_saturated": saturated.stranded,
            "virtual_seconds": self.clock.now_seconds(),
            "output_tokens": stats.output_tokens,
            "output_tokens_per_second": stats.output_tokens / max(1e-9, self.clock.now_seconds()),
            "spec_decode_drafts": stats.spec_decode_drafts,
            "spec_decode_draft_tokens": stats.spec_decode_draft_tokens,
            "spec_decode_accepted_tokens": stats.spec_decode_accepted_tokens,
            "max_running": self._engine.max_running,
            "max_model_len": self._engine.limits.max_model_len,
            "rungs": stats.rungs,
            "cpu_buffer": stats.buffer,
            "groups": groups,
        }

    # ------------------------------------------------------------------ arrivals

    def _is_served(self, index: int) -> bool:
        tokens = self._placed[index].prompt_tokens + self._rows[index].output_tokens
        return tokens <= self._engine.limits.max_model_len

    def _arrive(self) -> None:
        """Submit the requests that are due; an idle machine first waits for the next arrival."""
        at_seconds = self._pending.next_seconds()
        if at_seconds is not None and not self._engine.has_work:
            self.clock.advance(max(0.0, at_seconds - self.clock.now_seconds()))
        while self._is_due() and not self._is_far_ahead():
            self._submit(self._pending.pop())

    def _is_due(self) -> bool:
        at_seconds = self._pending.next_seconds()
        return at_seconds is not None and at_seconds <= self.clock.now_seconds()

    def _is_far_ahead(self) -> bool:
        waiting = self._engine.num_queued()
        if waiting < AHEAD_REQUESTS:
            return False
        return waiting > self._engine.limits.max_num_seqs or self._waiting_tokens > AHEAD_TOKENS

    def _submit(self, index: int) -> None:
        row, place = self._rows[index], self._placed[index]
        came_seconds = self.requests[index].came_seconds = self._pending.came_seconds(index)
        if self._lateness is not None:
            self._lateness.on_submitted(RequestId(str(index)), came_seconds)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=row.output_tokens,
            ignore_eos=True,
            will_return=row.will_return,
        )
        prompt = to_token_bytes(self._prompts.prompt(index))
        spec = RequestSpec(RequestId(str(index)), prompt, sampling, images=place.images)
        if self._journaled.tell(Submit(spec)):
            self._pending.refuse(index, self.clock.now_seconds())
        else:
            self._waiting_tokens += place.prompt_tokens

    # --------------------------------------------------------------------- steps

    def _step(self) -> None:
        plan = self._journaled.plan()
        if not plan.work and not plan.preempted:
            raise RuntimeError(f"step {plan.step} computes nothing, and requests wait")
        self._leaves_waiting = self._engine.num_waiting() > 0 or self._is_due()
        self._note_admitted(plan)
        self._counts["scheduled"] += len(plan.work)
        self._counts["short_of_memory"] += self._is_short_of_memory(plan)
        self.clock.advance(self._machine.step_seconds(plan))
        events = self._journaled.commit(self._runner.run(plan))
        self._note(plan.step, events)
        if self._lateness is not None:
            self._journaled.note(self._lateness.step(events, self.clock.now_seconds()))

    def _is_short_of_memory(self, plan: StepPlan) -> bool:
        """Return whether a request waits for memory: the step had tokens and a seat left.

        False if the first waiting requests only wait for a prefix that another request computes.
        """
        before, self._held_back = self._held_back, self._engine.stats().rungs["wait_for_prefix"]
        limits, held_back = self._engine.limits, self._held_back - before
        has_tokens = sum(work.count for work in plan.work) < limits.max_num_batched_tokens
        has_seats = self._engine.num_running() < limits.max_num_seqs
        waiting = self._engine.num_waiting()
        return has_tokens and has_seats and min(waiting, MAX_HELD_BACK) > held_back

    def _look(self) -> None:
        """Sample the pool after a step's tokens are computed."""
        running, waits = self._memory.running(), self._leaves_waiting
        if self.means.num_steps % self._look_every:
            sample = Sample(len(running), waits, self._seen.groups)
        else:
            sample = self._meter.sample(running, self._memory.totals(), leaves_waiting=waits)
        self._seen = sample
        self.means.add(sample)
        if self._timeline is not None:
            self._timeline.offer(lambda: self._moment(sample, self._memory.totals().empty_large))

    def _moment(self, sample: Sample, empty_large: int) -> Moment:
        layout, now_seconds = self._memory.layout, self.clock.now_seconds()
        return Moment(
            self._engine.step,
            now_seconds,
            sample.running,
            self._engine.num_waiting() + self._pending.num_due(now_seconds),
            layout.pool_bytes,
            empty_large * layout.large_page_bytes,
            tuple(
                GroupMoment(
                    spec.name,
                    group.needed_bytes,
                    group.used_bytes,
                    group.unwritten_bytes,
                    group.stranded_bytes,
                    group.cached_bytes,
                )
                for spec, group in zip(layout.groups, sample.groups, strict=True)
            ),
        )

    def _note_admitted(self, plan: StepPlan) -> None:
        for request_id in plan.admitted:
            figures = self.requests[int(request_id)]
            if figures.admitted_step is None:
                figures.admitted_step = plan.step
                self._waiting_tokens -= figures.prompt_tokens

    def _note(self, step: int, events: Iterable[Event]) -> None:
        reached_seconds = self.clock.now_seconds() + self._machine.request_seconds
        for event in events:
            if isinstance(event, Tokens) and event.first_index == 0:
                figures = self.requests[int(event.request_id)]
                figures.first_token_step = step
                figures.first_token_seconds = reached_seconds
            elif isinstance(event, Finished):
                self._counts["finished"] += 1
                self._pending.on_ended(int(event.request_id), self.clock.now_seconds())
                figures = self.requests[int(event.request_id)]
                figures.finish_step, figures.hit_tokens = step, event.cached_tokens
                figures.finish_seconds = reached_seconds
