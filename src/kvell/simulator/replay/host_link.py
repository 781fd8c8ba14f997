"""The link to host memory in virtual time: seconds of copies to the CPU buffer and back."""

from dataclasses import dataclass

from kvell.engine.cpu_buffer.swapping import moved_bytes
from kvell.engine.requests.plan import StepPlan
from kvell.memory import Layout
from kvell.simulator.replay.runner import StepTimer

WAITS = 0


@dataclass(frozen=True)
class WithHostLink:
    """A machine whose steps wait for the pages that a plan moves, all at once or layer by layer.

    Layer by layer (eLLM §4.3.2), a layer is computed while the next one's pages move, out and in
    at the same time: a step takes the longer of computing and moving, plus one layer's move::

        moving     1 │ 2 │ 3 │ … │ L
        computing      1 │ 2 │ 3 │ … │ L

    :param bytes_per_second: of the link, one way.
    :param streamed_layers: L; with WAITS, nothing overlaps.
    """

    machine: StepTimer
    layout: Layout
    bytes_per_second: float
    streamed_layers: int = WAITS

    @property
    def request_seconds(self) -> float:
        """The machine's extra seconds of a request; see :class:`StepTimer`."""
        return self.machine.request_seconds

    def step_seconds(self, plan: StepPlan) -> float:
        """Return the seconds of a step and of the pages it moves; see :class:`StepTimer`."""
        groups = self.layout.groups
        out = moved_bytes(plan.offloads, groups) / self.bytes_per_second
        back = moved_bytes(plan.fetches, groups) / self.bytes_per_second
        computing = self.machine.step_seconds(plan)
        if self.streamed_layers == WAITS:
            return computing + out + back
        moving = max(out, back)
        return max(computing, moving) + moving / self.streamed_layers
