"""What computes steps and holds pages in a virtual instance."""

from typing import Protocol, Self

from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.memory import Ints
from kvell.simulator.replay.runner import TraceRunner


class Device(Protocol):
    """Pages of one incarnation of an instance, and the model that computes into them."""

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out a step."""
        ...

    def read(self, source: Self, rows: Ints) -> None:
        """Copy pages of another instance's device.

        :param rows: int32 [m, 3]: group, page there, own page.
        """
        ...


class TraceDevice:
    """Answers with the tokens of a trace; its pages have sizes and no content."""

    def __init__(self, runner: TraceRunner) -> None:
        self._runner = runner

    def run(self, plan: StepPlan) -> StepResult:
        """Return the trace's tokens; see :class:`Device`."""
        return self._runner.run(plan)

    def read(self, source: Self, rows: Ints) -> None:
        """Do nothing; see :class:`Device`."""
