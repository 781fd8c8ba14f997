"""The cost in virtual time of a request's pages at another instance."""

from dataclasses import dataclass

from kvell.engine.requests.plan import StepPlan
from kvell.mempool.loans.creditor_ledger import CreditorLedger


@dataclass(frozen=True)
class NeighbourReads:
    """Seconds on top of those of steps whose pages are all local (Infinite-LLM, equation 6).

    :param section_seconds: added to a step for each section that it reads at another instance.
    :param lent_seconds: the same for each section that the instance lends.
    """

    section_seconds: float = 0.0
    lent_seconds: float = 0.0

    def seconds(self, plan: StepPlan, lending: CreditorLedger) -> float:
        """Return the seconds of one step.

        :param lending: of its instance.
        """
        if not (plan.borrowed or lending.lends):
            return 0.0
        return len(plan.borrowed) * self.section_seconds + len(lending) * self.lent_seconds


IN_ONE_MEMORY = NeighbourReads()
"""All instances share one memory, so that the cost of a page is the same at each."""
