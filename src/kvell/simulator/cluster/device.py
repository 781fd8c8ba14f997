"""The model and the pages of a virtual instance."""

from collections.abc import Sequence
from typing import Self

from kvell.engine.requests.plan import StepPlan
from kvell.memory import Ints
from kvell.simulator.replay.runner import TraceRunner


class Device(TraceRunner):
    """Pages of one incarnation of an instance, and the model that computes into them.

    This one answers with the tokens of a trace, and its pages have sizes and no content.
    """

    def finish(self, plan: StepPlan, missed: Sequence[int]) -> None:
        """End a step and its reads.

        :param missed: handles of rows that read others' pages too late.
        """

    def read(self, source: Self, rows: Ints) -> None:
        """Copy pages of another instance's device.

        :param rows: int32 [m, :class:`.PulledPageRow`].
        """

    def put_behind(self, source: Self, first_large: int) -> None:
        """Map the pages of another instance's device after the own ones, from a large page on."""

    def drop_behind(self, first_large: int) -> None:
        """Unmap the pages from there."""
