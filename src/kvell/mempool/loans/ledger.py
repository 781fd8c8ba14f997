"""Both sides of one instance's loans, without I/O; an instance never borrows and lends together.

While an instance borrows, in any state of the loan, it refuses to lend; while it lends, it does not
borrow.  Two instances that ask each other at the same moment are therefore both refused.

Source: Infinite-LLM §5.2.
"""

from collections.abc import Sequence

from kvell.memory import GroupKind, GroupSpec
from kvell.mempool.holds import Holds
from kvell.mempool.loans.creditor_ledger import CreditorLedger
from kvell.mempool.loans.debtor_ledger import DebtorLedger
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
"""The time, 30 seconds, that debtors have to return the loans of a draining instance."""
MOST_LOANS_OF_DEBTOR = 1024
LENDABLE_PARTS = 32
"""An instance lends at most 31/32 of its memory; it recalls what it needs."""


def most_lendable(groups: Sequence[GroupSpec], num_large_pages: int) -> list[int]:
    """Return the pages of each group that may be lent: 31/32 with full attention, else none.

    The other kinds release pages as a text grows, or keep a whole text in one state.
    """
    return [
        group.pages_per_large * num_large_pages * (LENDABLE_PARTS - 1) // LENDABLE_PARTS
        if group.kind is GroupKind.FULL
        else 0
        for group in groups
    ]


class Ledger:
    """The loans of one incarnation of an instance, as debtor and as creditor."""

    def __init__(
        self,
        instance: str,
        incarnation: int,
        fingerprint: str,
        holds: Holds,
        numbers: RightNumbers,
        most_lent: Sequence[int],
        most_loans: int = MOST_LOANS_OF_DEBTOR,
    ) -> None:
        self.borrowing = DebtorLedger(instance, incarnation, fingerprint, numbers)
        self.lending = CreditorLedger(
            instance, incarnation, fingerprint, holds, numbers, most_lent, most_loans
        )
        self.borrowing.lends = lambda: self.lending.lends
        self.lending.borrows = lambda: len(self.borrowing) > 0

    @property
    def num_filled(self) -> int:
        return self.borrowing.num_filled + self.lending.num_filled

    @property
    def is_filling(self) -> bool:
        return self.lending.is_filling or self.borrowing.is_filling

    @property
    def next_deadline(self) -> Tick | None:
        """The next time at which :meth:`tick` has an effect; None if there is none."""
        deadlines = (self.borrowing.next_deadline, self.lending.next_deadline)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def on_message(self, peer: str, message: LoanMessage, now: Tick) -> list[Action]:
        borrowing, lending = self.borrowing, self.lending
        if isinstance(message, Borrow):
            return lending.borrow(peer, message, now)
        if isinstance(message, Lent):
            return borrowing.on_lent(peer, message)
        if isinstance(message, Fill):
            return lending.fill(peer, message)
        if isinstance(message, Filled):
            return borrowing.on_filled(peer, message)
        if isinstance(message, Recall):
            return borrowing.on_recalled(peer, message)
        if isinstance(message, GiveBack):
            return lending.given_back(peer, message)
        if isinstance(message, GivenBack):
            return borrowing.given_back(peer, message)
        return borrowing.over(peer, message) + lending.over(peer, message)

    def tick(self, now: Tick) -> list[Action]:
        return self.borrowing.tick(now) + self.lending.tick(now)

    def instance_died(self, instance: str, incarnation: int) -> list[Action]:
        """End the loans of a dead incarnation of an instance and of earlier ones; 0: of all."""
        mine = self.borrowing.instance_died(instance, incarnation)
        return mine + self.lending.instance_died(instance, incarnation)

    def drain(self, now: Tick) -> list[Action]:
        """Stop borrowing and lending, and recall all lent pages.

        The user must return the borrowed pages.
        """
        self.borrowing.is_closed = self.lending.is_closed = True
        return self.lending.recall_all(now, DRAIN_TICKS)
