"""Both sides of one instance's loans, without I/O; an instance is never on both at once.

While it has a loan of its own, in any state, it refuses to lend; while it lends, it does not
borrow.  Two instances that ask each other at the same moment are therefore both refused.

Source: Infinite-LLM §5.2.
"""

from collections.abc import Sequence

from kvell.memory import GroupKind, GroupSpec, HoldingCore
from kvell.mempool.holds import Holds
from kvell.mempool.loans.borrowing import Borrowing
from kvell.mempool.loans.lending import Lending
from kvell.mempool.loans.messages import (
    Borrow,
    Fill,
    Filled,
    GiveBack,
    GivenBack,
    Lent,
    LoanMessage,
    Recall,
)
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action
from kvell.mempool.transfers.numbers import RightNumbers

DRAIN_TICKS: Tick = 30_000
"""How long debtors have, 30 seconds, to give back what a draining instance lends."""
MOST_LOANS_OF_DEBTOR = 1024
LENDABLE_PARTS = 32
"""An instance lends at most all but one part in 32 of its memory; it recalls what it needs."""


def most_lendable(groups: Sequence[GroupSpec], num_large_pages: int) -> list[int]:
    """Pages of each group that may be lent: 31/32 of those with full attention, no others.

    The other kinds leave pages behind as a text grows, or keep a whole text in one state.
    """
    return [
        one.pages_per_large * num_large_pages * (LENDABLE_PARTS - 1) // LENDABLE_PARTS
        if one.kind is GroupKind.FULL
        else 0
        for one in groups
    ]


class Ledger:
    """What one incarnation of an instance borrows and lends.

    :param fingerprint: of its layout.
    :param core: over which ``holds`` are.
    :param numbers: of the incarnation's rights, which transfers have too.
    :param most_lent: pages of each group that are lent at most.
    :param most_loans: to one debtor.
    :ivar borrowing: the debtor's side, and ``lending``: the creditor's.
    """

    def __init__(
        self,
        instance: str,
        incarnation: int,
        fingerprint: str,
        core: HoldingCore,
        holds: Holds,
        numbers: RightNumbers,
        most_lent: Sequence[int],
        most_loans: int = MOST_LOANS_OF_DEBTOR,
    ) -> None:
        self._core = core
        self.borrowing = Borrowing(instance, incarnation, fingerprint, numbers)
        self.lending = Lending(
            instance, incarnation, fingerprint, holds, numbers, most_lent, most_loans
        )
        self.borrowing.lends = lambda: self.lending.lends
        self.lending.borrows = lambda: len(self.borrowing) > 0

    @property
    def next_deadline(self) -> Tick | None:
        """When :meth:`tick` has something to do; None while no loan waits for anything."""
        found = (self.borrowing.next_deadline, self.lending.next_deadline)
        return min((one for one in found if one is not None), default=None)

    def heard(self, peer: str, message: LoanMessage, now: Tick) -> list[Action]:
        """A message of another instance."""
        borrowing, lending = self.borrowing, self.lending
        if isinstance(message, Borrow):
            return lending.borrow(peer, message, now)
        if isinstance(message, Lent):
            return borrowing.lent(peer, message)
        if isinstance(message, Fill):
            return lending.fill(peer, message)
        if isinstance(message, Filled):
            return borrowing.filled(peer, message)
        if isinstance(message, Recall):
            return borrowing.recalled(peer, message)
        if isinstance(message, GiveBack):
            return lending.given_back(peer, message)
        if isinstance(message, GivenBack):
            return borrowing.given_back(peer, message)
        return borrowing.over(peer, message) + lending.over(peer, message)

    def tick(self, now: Tick) -> list[Action]:
        """Time has passed."""
        return self.borrowing.tick(now) + self.lending.tick(now)

    def instance_died(self, instance: str, incarnation: int) -> list[Action]:
        """An incarnation of an instance, or an earlier one, is no more; 0: whichever it is."""
        mine = self.borrowing.instance_died(instance, incarnation)
        return mine + self.lending.instance_died(instance, incarnation)

    def drain(self, now: Tick) -> list[Action]:
        """Borrow and lend nothing more, and recall what is lent.

        What is borrowed is the user's to give back.
        """
        self.borrowing.is_closed = self.lending.is_closed = True
        return self.lending.recall_all(now, DRAIN_TICKS)

    def audit(self) -> list[str]:
        """Every contradiction between loans, holds and the core, a sentence for each."""
        found = self.borrowing.audit() + self.lending.audit()
        if len(self.borrowing) and self.lending.lends:
            found.append("the instance borrows and lends at once")
        lent = self.lending.pages()
        snapshot = self._core.snapshot()
        found += [
            f"page {one.page} of group {one.group} is lent, and the index names it"
            for one in snapshot.index
            if (one.group, one.page) in lent
        ]
        found += [
            f"page {page} of group {group} is lent, and has {users} users"
            for group, page in sorted(lent)
            if (users := snapshot.refs[group].get(page, 0)) != 1
        ]
        return found
