"""The model and the pages of a virtual instance."""

from collections.abc import Sequence
from typing import Protocol, Self

from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.memory import Ints
from kvell.simulator.replay.runner import TraceRunner


class Device(Protocol):
    """Pages of one incarnation of an instance, and the model that computes into them."""

    def run(self, plan: StepPlan) -> StepResult:
        """Begin a step; its result is available before it ends."""
        ...

    def finish(self, plan: StepPlan, missed: Sequence[int]) -> None:
        """End a step and its reads.

        :param missed: handles of rows that read others' pages too late.
        """
        ...

    def read(self, source: Self, rows: Ints) -> None:
        """Copy pages of another instance's device.

        :param rows: int32 [m, 3]: group, page there, own page.
        """
        ...

    def put_behind(self, source: Self, first_large: int) -> None:
        """Map the pages of another instance's device after the own ones, from a large page on."""
        ...

    def take_away(self, first_large: int) -> None:
        """Unmap the pages from there."""
        ...


class TraceDevice:
    """Device that answers with the tokens of a trace; its pages have sizes and no content."""

    def __init__(self, runner: TraceRunner) -> None:
        self._runner = runner

    def run(self, plan: StepPlan) -> StepResult:
        """Return the trace's tokens; see :class:`Device`."""
        return self._runner.run(plan)

    def finish(self, plan: StepPlan, missed: Sequence[int]) -> None:
        """Do nothing; see :class:`Device`."""

    def read(self, source: Self, rows: Ints) -> None:
        """Do nothing; see :class:`Device`."""

    def put_behind(self, source: Self, first_large: int) -> None:
        """Do nothing; see :class:`Device`."""

    def take_away(self, first_large: int) -> None:
        """Do nothing; see :class:`Device`."""
