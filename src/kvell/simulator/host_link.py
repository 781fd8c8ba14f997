"""The link to the host's memory in virtual time: what plans copy to the CPU buffer and back."""

from dataclasses import dataclass

from kvell.engine.plan import StepPlan
from kvell.engine.swapping import moved_bytes
from kvell.memory import Layout
from kvell.simulator.runner import StepTimer


@dataclass(frozen=True)
class WithHostLink:
    """A machine whose steps wait for the pages that a plan moves: nothing is overlapped.

    :param bytes_per_second: of the link, one way.
    """

    machine: StepTimer
    layout: Layout
    bytes_per_second: float

    @property
    def request_seconds(self) -> float:
        """See :class:`StepTimer`."""
        return self.machine.request_seconds

    def step_seconds(self, plan: StepPlan) -> float:
        """See :class:`StepTimer`."""
        groups = self.layout.groups
        size_bytes = moved_bytes(plan.offloads, groups) + moved_bytes(plan.fetches, groups)
        return self.machine.step_seconds(plan) + size_bytes / self.bytes_per_second
