"""The cost in virtual time of a request's pages at another instance: read in place, or by queries.

A step that *asks* sends its query rows to the creditors, computes attention over its own pages, and
waits for what the creditors have not answered by then.  A creditor answers one query after another,
and its own step takes longer by the time of its answers (Infinite-LLM §4, equation 6).
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from msgspec import structs

from kvell.cost.prices import ExecCosts
from kvell.engine.requests.plan import StepPlan
from kvell.engine.running.lent.queries import PATIENCE_SECONDS
from kvell.mempool.loans.creditor_ledger import CreditorLedger
from kvell.simulator.cluster.network import Endpoint, Network
from kvell.simulator.replay.runner import StepTimer


@dataclass(frozen=True)
class NeighbourReads:
    """Seconds on top of those of steps whose pages are all local, if they are read in place.

    :param section_seconds: added to a step for each section that it reads at another instance.
    :param lent_seconds: the same for each section that the instance lends.
    :param copied_seconds: added to a step for each section whose copy to or from the instance has
        ended since the last one, as far as the computation does not hide copies (figure 12).
    """

    section_seconds: float = 0.0
    lent_seconds: float = 0.0
    copied_seconds: float = 0.0

    def seconds(self, plan: StepPlan, lending: CreditorLedger) -> float:
        if not (plan.borrowed or lending.lends):
            return 0.0
        in_place = sum(not pages.by_queries for pages in plan.borrowed)
        return in_place * self.section_seconds + len(lending) * self.lent_seconds


IN_ONE_MEMORY = NeighbourReads()
"""All instances share one memory, so that the cost of a page is the same at each."""


@dataclass(frozen=True)
class AskingStep:
    """A step that may ask creditors.

    :param missed: handles of rows that lack an answer, so that they do not count.
    """

    seconds: float
    missed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PricedSteps:
    """The duration of steps, with their queries to creditors.

    :param machine: times steps whose pages are all local.
    :param costs: prices of the model, as the instances report them.
    :param asks: whether instances of other hosts are asked for attention over what they lend.
    """

    machine: StepTimer
    costs: ExecCosts
    network: Network
    asks: bool

    def begin(self, debtor: Endpoint, plan: StepPlan) -> AskingStep:
        if not plan.away:
            return AskingStep(self.machine.step_seconds(plan))
        away = dict(plan.away)
        own = [
            structs.replace(work, start=work.start - away.get(work.handle, 0)) for work in plan.work
        ]
        local_seconds = self.machine.step_seconds(replace(plan, work=tuple(own)))
        attended = sum(self._attention(work.start + work.count, work.count) for work in own)
        wait_seconds, missed = self._ask(debtor, plan, away)
        return AskingStep(local_seconds + max(0.0, wait_seconds - attended), missed)

    def _ask(
        self, debtor: Endpoint, plan: StepPlan, away: dict[int, int]
    ) -> tuple[float, frozenset[int]]:
        """Return the time until all have answered or none is waited for, and the missed handles."""
        rows = {work.handle: work.count for work in plan.work}
        remote = [pages for pages in plan.borrowed if pages.by_queries]
        sections = Counter(pages.handle for pages in remote)
        seconds: dict[Endpoint, float] = defaultdict(float)
        handles: dict[Endpoint, set[int]] = defaultdict(set)
        missed = set[int]()
        for pages in remote:
            creditor = self.network.find(pages.instance, pages.incarnation)
            if creditor is None or pages.right not in creditor.rights:
                missed.add(pages.handle)
                continue
            size = away[pages.handle] / sections[pages.handle]
            seconds[creditor] += self._attention(size, rows[pages.handle])
            handles[creditor].add(pages.handle)
        waits = {
            creditor: self.network.ask(debtor, creditor, work_seconds)
            for creditor, work_seconds in seconds.items()
        }
        silent = [creditor for creditor, wait in waits.items() if wait is None]
        missed.update(*(handles[creditor] for creditor in silent))
        longest = max((wait for wait in waits.values() if wait is not None), default=0.0)
        longest = PATIENCE_SECONDS if silent else longest
        sent = sum(rows[handle] for handle in away)
        wait = self.costs.asked_step_seconds + sent * self.costs.asked_row_seconds + longest
        return wait, frozenset(missed)

    def _attention(self, tokens: float, rows: int) -> float:
        return tokens * max(self.costs.held_token_seconds, rows * self.costs.pair_seconds)
