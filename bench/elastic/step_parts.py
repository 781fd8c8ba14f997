"""Where an engine's step time goes: the model, mapping memory, scheduling.

Mapping is the device's calls (map, unmap, commit) during a step; the first touch of a mapped chunk
counts as the model's, since it happens there.  Scheduling is the rest: planning, results, events.
Steps that compute nothing, while the pool still gets its memory, are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvell.clock import Clock, MonotonicClock
from kvell.device.chunks import AddressRange, ChunkDevice, Ints
from kvell.engine.engine import Engine
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.protocol.messages import Event
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.running.runner import Runner

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Shares:
    """Parts (0 to 1) of the total time of all steps, and the mean step."""

    steps: int
    step_seconds: float
    scheduling: float
    mapping: float


class TimedRunner:
    """A runner that measures its own seconds, and whether its last step computed anything."""

    def __init__(self, runner: Runner, clock: Clock) -> None:
        self.seconds, self.has_computed = 0.0, False
        self._runner, self._clock = runner, clock

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan, timed; see :class:`Runner`."""
        began_seconds = self._clock.now_seconds()
        result = self._runner.run(plan)
        self.seconds += self._clock.now_seconds() - began_seconds
        self.has_computed = bool(plan.work)
        return result


class TimedChunks:
    """A device that measures the seconds of its calls; all else is passed on."""

    def __init__(self, device: ChunkDevice, clock: Clock) -> None:
        self.seconds = 0.0
        self._device, self._clock = device, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def commit(self, chunks: Ints) -> None:
        """Commit chunks, timed; see :class:`ChunkDevice`."""
        self._timed(self._device.commit, chunks)

    def map(self, area: AddressRange, positions: Ints, chunks: Ints) -> None:
        """Map chunks, timed; see :class:`ChunkDevice`."""
        self._timed(self._device.map, area, positions, chunks)

    def unmap(self, area: AddressRange, positions: Ints) -> int:
        """Unmap positions, timed; see :class:`ChunkDevice`."""
        return self._timed(self._device.unmap, area, positions)

    def _timed(self, call: Callable[..., Answer], *asked: Any) -> Answer:
        began_seconds = self._clock.now_seconds()
        try:
            return call(*asked)
        finally:
            self.seconds += self._clock.now_seconds() - began_seconds


class StepParts:
    """Watches an engine's steps from now on; the engine must plan and run them in turn."""

    def __init__(self, engine: Engine, clock: Clock | None = None) -> None:
        self._engine, self._clock = engine, clock or MonotonicClock()
        self._runner = TimedRunner(engine.runner, self._clock)
        engine.runner = self._runner
        self._chunks: TimedChunks | None = None
        memory = engine.core.step_memory
        if isinstance(memory, SharedMemory):
            self._chunks = TimedChunks(memory.memory.device, self._clock)
            memory.memory.device = self._chunks
        self._steps = 0
        self._seconds = self._run_seconds = self._map_seconds = 0.0

    def step(self) -> list[Event]:
        """One step of the engine."""
        self._runner.seconds = 0.0
        if self._chunks is not None:
            self._chunks.seconds = 0.0
        began_seconds = self._clock.now_seconds()
        events = self._engine.step()
        seconds = self._clock.now_seconds() - began_seconds
        if self._runner.has_computed:
            self._steps += 1
            self._seconds += seconds
            self._run_seconds += self._runner.seconds
            self._map_seconds += self._chunks.seconds if self._chunks is not None else 0.0
        return events

    def shares(self) -> Shares:
        """Shares of all steps so far."""
        scheduling_seconds = self._seconds - self._run_seconds - self._map_seconds
        whole_seconds = max(self._seconds, 1e-9)
        return Shares(
            self._steps,
            self._seconds / max(1, self._steps),
            scheduling_seconds / whole_seconds,
            self._map_seconds / whole_seconds,
        )


def shares_line(shares: Shares) -> str:
    """The shares as text."""
    return (
        f"a step {1e3 * shares.step_seconds:.1f} ms, scheduling {100 * shares.scheduling:.2f} %, "
        f"mapping {100 * shares.mapping:.2f} %"
    )
