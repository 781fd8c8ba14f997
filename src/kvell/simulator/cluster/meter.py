"""The meter of one incarnation: its admissions, its use of memory, and whether it is late."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from kvell.engine.core.core import EngineCore
from kvell.engine.core.lateness import Lateness, LatenessWatch
from kvell.engine.planning.admission import MAX_HELD_BACK
from kvell.engine.protocol.messages import Event
from kvell.engine.requests.plan import StepPlan
from kvell.engine.requests.request import Request
from kvell.memory import Facts, Ints, LayerSpec, MemoryCore, facts_of
from kvell.simulator.cluster.front import VirtualFront
from kvell.simulator.report.metrics import MemoryMeter, RunningRequest, Sample, StepMeans
from kvell.simulator.report.timeline import GroupMoment, Moment, Timeline
from kvell.vocabulary import RequestId

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")

LOOKS = ("layout", "snapshot", "totals")
"""The members that only look."""


class MeteredCore:
    """Wrapper that passes all calls on to ``core`` and decides nothing.

    :ivar nanoseconds: time inside the calls that manage memory, not in those that only look.
    :ivar on_advanced: called when a step's tokens are computed and pages before windows are
        released, but those of finished requests are not yet: the moment of sampling.
    """

    def __init__(self, core: MemoryCore) -> None:
        self.nanoseconds = 0
        self.on_advanced: Callable[[], None] = lambda: None
        self._core = core
        self._advance = self._timed(core.advance)

    def advance(self, handles: Ints, computed: Ints) -> None:
        """Pass on and time; then call ``on_advanced``."""
        self._advance(handles, computed)
        self.on_advanced()

    def __getattr__(self, name: str) -> Any:
        """Return a member of the core; its calls are timed unless they only look."""
        member = getattr(self._core, name)
        if name not in LOOKS:
            member = self.__dict__[name] = self._timed(member)
        return member

    def _timed(self, call: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        def measure(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            start = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self.nanoseconds += time.perf_counter_ns() - start

        return measure


@dataclass(frozen=True)
class Metering:
    """The samples of each instance's pool.

    :param layers: the model's layers, which determine the tokens that are still needed.
    :param look_every: number of steps between samples of the use of pages; memory figures stay the
        same in between.
    :param timeline: is offered every step; it shows all instances as one.
    """

    layers: Sequence[LayerSpec]
    look_every: int = 1
    timeline: Timeline | None = None


class InstanceMeter:
    """Observer of one incarnation.

    :param memory: the memory core, which is sampled at each step.
    :param metering: None: nothing is sampled.
    :ivar core: the memory core for the engine, which must be set as ``engine`` before it runs.
    :ivar scheduled: number of requests in all steps; ``short_of_memory``: number of steps in which
        a request waited for memory.
    """

    engine: EngineCore

    def __init__(
        self,
        memory: MemoryCore,
        front: VirtualFront,
        metering: Metering | None = None,
        lateness: LatenessWatch | None = None,
        on_sampled: Callable[[], None] = lambda: None,
    ) -> None:
        self.memory = MeteredCore(memory)
        self.core = self._unmetered = memory
        self.means = StepMeans(memory.layout)
        self.latest = Sample(0, False, ())
        self.scheduled = self.short_of_memory = 0
        self._front, self._metering, self._lateness = front, metering, lateness
        self._on_sampled = on_sampled
        self._held_back = 0
        self._leaves_waiting = False
        self._constants: dict[int, tuple[int, Facts]] = {}
        """The hit and the facts of each running request, by handle."""
        if metering is not None:
            self._pool = MemoryMeter(memory.layout, metering.layers)
            self.core, self.memory.on_advanced = self.memory, self._look

    def on_submitted(self, request_id: RequestId) -> None:
        if self._lateness is not None:
            came_seconds = self._front.requests[int(request_id)].came_seconds
            self._lateness.on_submitted(request_id, came_seconds or 0.0)

    def on_planned(self, plan: StepPlan) -> None:
        if self._metering is not None:
            waits = self.engine.counters.num_waiting > 0
            self._leaves_waiting = waits or self._front.holds_requests
            self.scheduled += len(plan.work)
            self.short_of_memory += self._is_short_of_memory(plan)
        self._front.note_admitted(plan)

    def on_committed(self, events: Iterable[Event], now_seconds: float) -> Lateness | None:
        return None if self._lateness is None else self._lateness.step(events, now_seconds)

    def _is_short_of_memory(self, plan: StepPlan) -> bool:
        """Return whether a request waits for memory: the step had tokens and a seat left.

        False if the first waiting requests only wait for a prefix that another request computes.
        """
        before = self._held_back
        self._held_back = self.engine.scheduler.seats.rungs["wait_for_prefix"]
        held_back = self._held_back - before
        has_tokens = plan.num_tokens < self.engine.limits.max_num_batched_tokens
        has_seats = len(self.engine.running) < self.engine.limits.max_num_seqs
        waiting = self.engine.counters.num_waiting
        return has_tokens and has_seats and min(waiting, MAX_HELD_BACK) > held_back

    def _look(self) -> None:
        """Sample the pool after a step's tokens are computed."""
        assert self._metering is not None
        if len(self.means.samples) % self._metering.look_every:
            running = len(self.engine.running)
            self.latest = Sample(running, self._leaves_waiting, self.latest.groups)
        else:
            totals = self.memory.totals()
            waits = self._leaves_waiting
            self.latest = self._pool.sample(self._running(), totals, leaves_waiting=waits)
        self.means.samples.append(self.latest)
        self._on_sampled()

    def _running(self) -> list[RunningRequest]:
        before, self._constants = self._constants, {}
        running: list[RunningRequest] = []
        for request in self.engine.running:
            handle = request.handle
            constants = before.get(handle) or self._read(request)
            self._constants[handle] = constants
            running.append(RunningRequest(request.settled, *constants, request.model))
        return running

    def _read(self, request: Request) -> tuple[int, Facts]:
        length = len(request.prompt)
        facts = facts_of(length, length, request.images)
        return self._unmetered.hit_tokens(request.handle), facts


def moment_of(meters: Sequence[InstanceMeter], now_seconds: float, arrived: int) -> Moment:
    """Return the latest samples of instances with equal pools, as if they were one.

    Requests that are between two instances count as waiting.

    :param arrived: number of requests that have arrived and not ended.
    """
    layout = meters[0].memory.layout
    engines = [meter.engine for meter in meters]
    empty_large = sum(meter.memory.totals().empty_large for meter in meters)
    samples = [meter.latest.groups for meter in meters if meter.latest.groups]
    return Moment(
        sum(engine.step for engine in engines),
        now_seconds,
        sum(meter.latest.running for meter in meters),
        arrived - sum(len(engine.running) for engine in engines),
        layout.pool_bytes * len(meters),
        empty_large * layout.large_page_bytes,
        tuple(
            GroupMoment(
                spec.name,
                sum(group.needed_bytes for group in groups),
                sum(group.used_bytes for group in groups),
                sum(group.unwritten_bytes for group in groups),
                sum(group.stranded_bytes for group in groups),
                sum(group.cached_bytes for group in groups),
            )
            for spec, *groups in zip(layout.groups, *samples, strict=True)
        ),
    )
