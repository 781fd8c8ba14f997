"""What it costs in virtual time that a request's pages lie at another instance."""

from dataclasses import dataclass

from kvell.engine.requests.plan import StepPlan
from kvell.mempool.loans.lending import Lending


@dataclass(frozen=True)
class NeighbourReads:
    """Seconds on top of those of steps whose pages are all local (Infinite-LLM, equation 6).

    :param section_seconds: that a step takes longer for each section that it reads elsewhere.
    :param lent_seconds: the same for each section that the instance lends.
    """

    section_seconds: float = 0.0
    lent_seconds: float = 0.0

    def seconds(self, plan: StepPlan, lending: Lending) -> float:
        """Of one step.

        :param lending: of its instance.
        """
        if not (plan.borrowed or lending.lends):
            return 0.0
        return len(plan.borrowed) * self.section_seconds + len(lending) * self.lent_seconds


IN_ONE_MEMORY = NeighbourReads()
"""All instances share one memory, so that a page costs the same wherever it lies."""
