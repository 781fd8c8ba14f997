"""The creditor's side of loans, without I/O.

::

    Borrow ──► GRANTED ──Fill──► FILLING ──pulled──► LENT ──recall──► LENT until a deadline
      │           └─ deadline, recall ─┐ └─ deadline, recall   └─ GiveBack ──► ended     │
      └─ refused                       ▼    ▼                                            ▼
                                    ended ◄─ ENDING, until the pull has ended ended ◄─ REVOKED

Memory is lent first come, first served.  A reservation that is not filled ends at its deadline,
and immediately if it is recalled: the debtor still has its own pages.  A readable loan has no
deadline until it is recalled.  The right to read is granted when the pages are filled, and revoked
before they are reused.  A revoked loan has no pages, and is kept until the debtor has answered, so
that the debtor learns of it even if messages are lost.

A loan that *shares* the pages of another changes from GRANTED to LENT without being filled.  A
recall of shared pages recalls all loans that share them.

While an instance borrows, in any state of the loan, it refuses to lend; while it lends, it does not
borrow.  Two instances that ask each other at the same moment are therefore both refused.

Source: Infinite-LLM §5.2.2 and §6.2.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from typing_extensions import override

from kvell.memory import GroupKind, GroupSpec, Ints
from kvell.mempool.exchanges import FIRST_TICKS, Exchange, ExchangeSide, over, send
from kvell.mempool.holds import Holds
from kvell.mempool.loans.actions import (
    RECALLED,
    UNKNOWN,
    Counts,
    decode_counts,
    decode_pages,
)
from kvell.mempool.loans.messages import (
    Borrow,
    Fill,
    Filled,
    GiveBack,
    GivenBack,
    Lent,
    Loan,
    LoanOver,
    Recall,
)
from kvell.mempool.owners import Owner, Tick
from kvell.mempool.transfers.actions import Action, Grant, Pull, Revoke, Send, StopPull
from kvell.mempool.transfers.messages import MOST_TICKS, Transfer
from kvell.mempool.transfers.numbers import SLOTS, RightNumbers
from kvell.mempool.transfers.receiving import FOREVER
from kvell.pages.rows import PageRow


@dataclass
class LentPages(Exchange):
    """One loan of this creditor.

    :ivar owner: the owner of the hold on its pages, common to loans that share them.
    :ivar rows: int32 [m, :class:`.PageRow`]: local pages, in the order of groups.
    :ivar shares: whether it shares pages that are filled already.
    :ivar step_ticks: the duration of the debtor's steps, as reported.
    :ivar patience_ticks: the time that its recall left it.
    """

    owner: Owner
    counts: Counts
    rows: Ints
    right: Transfer
    shares: bool = False
    state: Literal["granted", "filling", "lent", "ending", "revoked"] = "granted"
    filling: Transfer | None = None
    step_ticks: Tick = 0
    patience_ticks: Tick = 0

    @property
    def has_pages(self) -> bool:
        return self.state != "revoked"

    @property
    def is_ending(self) -> bool:
        """Whether the pages come back without a further recall."""
        return self.state == "ending" or (self.state == "lent" and self.deadline is not None)


def together(lent: Mapping[Loan, LentPages]) -> list[list[Loan]]:
    """Return the loans with pages in the order of recall, grouped by shared pages.

    Loans that are not readable yet are first, then the youngest.
    """
    by_owner: dict[Owner, list[Loan]] = {}
    for loan, record in lent.items():
        if record.has_pages:
            by_owner.setdefault(record.owner, []).append(loan)
    youngest = list(reversed(by_owner.values()))
    return sorted(youngest, key=lambda loans: any(lent[loan].state == "lent" for loan in loans))


MOST_STEP_TICKS: Tick = 30_000
"""The longest step time that a recall respects; a debtor with longer steps may lose pages."""
NO_ROOM = "there is no room"
BORROWS = "the instance borrows memory itself"
MOST_LOANS = SLOTS // 2
"""The most concurrent loans of all debtors: transfers need slots of rights too."""


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


class CreditorLedger(ExchangeSide[Loan, LentPages]):
    """The loans of one incarnation of a creditor.

    :param fingerprint: the fingerprint of its layout; debtors must have the same.
    :param holds: the holds of the instance; a loan's hold has owner kind ``loan``.
    :param most_loans: the most loans of one debtor; further ones are refused.
    """

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
        super().__init__()
        self._instance, self._incarnation = instance, incarnation
        self._fingerprint, self._holds, self._numbers = fingerprint, holds, numbers
        self.most_lent = tuple(most_lent)
        self.most_loans = most_loans
        self.borrows: Callable[[], bool] = lambda: False
        """Whether the instance borrows memory; then it lends none."""
        self.is_wanted: Callable[[], bool] = lambda: True
        """Whether the instance still needs recalled pages; otherwise debtors get more time."""
        self.is_other_pull: Callable[[Transfer], bool] = lambda _transfer: False
        """Whether a transfer brings a text here, so that it cannot fill a loan."""
        self.is_closed = False
        """Whether the instance lends no more."""
        self.pulls: dict[Transfer, Loan] = {}
        self.num_filled = 0
        """Number of loans that were filled so far."""

    @property
    def lends(self) -> bool:
        return any(entry.has_pages for entry in self.open.values())

    @property
    def is_filling(self) -> bool:
        return bool(self.pulls)

    def page_rows(self) -> Ints:
        """Return all lent pages, each once, int32 [m, :class:`.PageRow`]."""
        rows = {entry.owner: entry.rows for entry in self.open.values() if entry.has_pages}
        return np.concatenate([np.empty((0, 2), np.int32), *rows.values()])

    def borrow(self, debtor: str, message: Borrow, now: Tick) -> list[Action]:
        """Hold empty pages for a debtor, or refuse.

        This answers ``try_move_kvcache`` of Infinite-LLM's Listing 1.
        """
        loan = message.loan
        if loan in self.open and loan.debtor == debtor:  # a repetition
            entry = self.open[loan]
            return [self._granted(loan, entry)] if entry.state == "granted" else []
        counts = decode_counts(message.counts, len(self.most_lent))
        problem = self._problem(debtor, message)
        if problem or counts is None:
            return [over(debtor, loan, problem or "there are no such pages")]
        deadline = now + min(message.ticks_left, MOST_TICKS)
        if message.shares:
            return self._shared(message, counts, deadline)
        lent = self.sum_of(self.open.values())
        limits = zip(lent, counts, self.most_lent, strict=True)
        if any(wanted and had + wanted > most for had, wanted, most in limits):
            return [over(debtor, loan, NO_ROOM)]
        owner = Owner("loan", loan.debtor, loan.incarnation, loan.number)
        try:
            hold = self._holds.hold_pages(
                owner, FOREVER, np.asarray(counts, np.int32), model=message.model
            )
        except ValueError as error:
            return [over(debtor, loan, str(error))]
        if hold is None:
            return [over(debtor, loan, NO_ROOM)]
        places = sorted(self._holds.places(owner).items())
        rows = np.asarray([(group, page) for (group, _), page in places], np.int32)
        return [self._granted(loan, self._new(message, deadline, owner, counts, rows))]

    def fill(self, debtor: str, message: Fill) -> list[Action]:
        """Begin to pull the debtor's pages, or its pages at another creditor."""
        loan = message.loan
        entry = self.of(debtor, loan)
        if (
            entry is None
            or message.right != entry.right.number
            or entry.state in ("ending", "revoked")
        ):
            return [over(debtor, loan, UNKNOWN)]
        if entry.state == "lent":  # the answer was lost
            return [Send(debtor, Filled(loan))]
        if entry.state == "filling":
            return []
        entry.step_ticks = max(0, min(message.step_ticks, MOST_STEP_TICKS))
        if entry.shares:
            return self._read(loan, entry)
        pages = decode_pages(message.pages, len(entry.rows))
        of = (message.source, message.incarnation) if message.source else (debtor, loan.incarnation)
        transfer = Transfer(*of, message.number)
        is_taken = transfer in self.pulls or self.is_other_pull(transfer)
        if pages is None or message.number < 1 or is_taken or message.source == self._instance:
            problem = "it cannot be filled from these pages"
            return self._over(loan, problem)
        entry.state = "filling"
        entry.filling = transfer
        self.pulls[transfer] = loan
        rows = np.insert(entry.rows, 1, np.asarray(pages, np.int32), axis=1)
        return [Pull(transfer, np.ascontiguousarray(rows, np.int32))]

    def on_pulled(self, transfer: Transfer, problem: str) -> list[Action]:
        """Handle the end of a pull.

        :param problem: "" if all pages were copied and the right to read was still valid then.
        """
        loan = self.pulls.pop(transfer)
        entry = self.open[loan]
        entry.filling = None
        if entry.state == "ending" or problem:
            is_known = entry.state == "ending"
            self._let_go(entry)
            del self.open[loan]
            return [] if is_known else [over(loan.debtor, loan, problem)]
        self.num_filled += 1
        return self._read(loan, entry)

    def given_back(self, debtor: str, message: GiveBack) -> list[Action]:
        """Handle the debtor's notice that it no longer reads the pages."""
        if message.loan.debtor != debtor:
            return [over(debtor, message.loan, UNKNOWN)]
        entry = self.open.get(message.loan)
        ended = [] if entry is None else self._ended(message.loan, entry)
        return [*ended, Send(debtor, GivenBack(message.loan))]

    def on_over(self, debtor: str, message: LoanOver) -> list[Action]:
        entry = self.of(debtor, message.loan)
        return [] if entry is None else self._ended(message.loan, entry)

    def recall(self, counts: Sequence[int], now: Tick, ticks: Tick) -> list[Action]:
        """Recall at least ``counts`` pages of each group, earlier recalls included.

        Loans that were never filled are first and end immediately.  Then the youngest are recalled,
        and revoked at a deadline unless they are returned before it.

        :param ticks: milliseconds until the deadline; 0: revoke immediately.  A debtor with long
            steps gets the time of two steps.
        """
        missing = np.asarray(counts)
        staying: list[list[tuple[Loan, LentPages]]] = []
        for loans in together(self.open):
            some = [(loan, self.open[loan]) for loan in loans]
            if all(entry.is_ending for _, entry in some):
                missing = missing - some[0][1].counts
            else:
                staying.append(some)
        actions: list[Action] = []
        for some in staying:
            if (missing <= 0).all():
                break
            if np.logical_and(missing > 0, some[0][1].counts).any():
                missing = missing - some[0][1].counts
                for loan, entry in some:
                    patience = max(ticks, 2 * entry.step_ticks) if ticks else 0
                    actions += self._recalled(loan, entry, now, now + patience)
        return actions

    def recall_all(self, now: Tick, ticks: Tick) -> list[Action]:
        """Recall all pages; the deadline of an earlier recall can only become earlier.

        :param ticks: milliseconds until the deadline; 0: revoke immediately.
        """
        loans = [loan for some in together(self.open) for loan in some]
        return [
            a for loan in loans for a in self._recalled(loan, self.open[loan], now, now + ticks)
        ]

    @override
    def tick(self, now: Tick) -> list[Action]:
        """End expired loans and resend unanswered messages."""
        actions: list[Action] = [
            send(entry, Recall(loan, entry.patience_ticks), now)
            for loan, entry in self.open.items()
            if self._waits_on(entry, now)
        ]
        for loan in self.late(now):
            entry = self.open[loan]
            if entry.state == "lent":
                actions += self._revoked(loan, entry, now)
            else:
                actions += self._over(loan, "it timed out")
        return actions + self.resend(now)

    def instance_died(self, instance: str, incarnation: int) -> list[Action]:
        """End the loans of a dead incarnation of a debtor and of earlier ones; 0: of all."""
        gone = self.of_instance(instance, incarnation)
        return [action for loan in gone for action in self._ended(loan, self.open[loan])]

    def _problem(self, debtor: str, message: Borrow) -> str:
        if message.loan.debtor != debtor:
            return "it is in another instance's name"
        if message.fingerprint != self._fingerprint:
            return "the layouts of the two instances differ"
        if self.is_closed:
            return "the instance is draining"
        if self.borrows():
            return BORROWS
        if message.ticks_left <= 0:
            return "its deadline has passed"
        of_debtor = sum(loan.debtor == debtor for loan in self.open)
        if of_debtor >= self.most_loans or len(self.open) >= MOST_LOANS:
            return "too many loans"
        return ""

    def sum_of(self, loans: Iterable[LentPages]) -> Counts:
        """Return the pages of each group of these loans; shared pages count once."""
        counts = {record.owner: record.counts for record in loans if record.has_pages}
        zero = np.zeros(len(self.most_lent), np.int64)
        return tuple(sum((np.asarray(pages) for pages in counts.values()), zero).tolist())

    def _new(
        self, message: Borrow, deadline: Tick, owner: Owner, counts: Counts, rows: Ints
    ) -> LentPages:
        loan = message.loan
        right = Transfer(self._instance, self._incarnation, self._numbers.take())
        entry = LentPages(loan.debtor, deadline, owner, counts, rows, right, message.shares > 0)
        entry.incarnation = loan.incarnation
        self.open[loan] = entry
        return entry

    def _shared(self, message: Borrow, counts: Counts, deadline: Tick) -> list[Action]:
        loan = message.loan
        other = self.open.get(Loan(loan.debtor, loan.incarnation, message.shares))
        if other is None or other.counts != counts or other.state != "lent" or other.is_ending:
            return [over(loan.debtor, loan, UNKNOWN)]
        return [self._granted(loan, self._new(message, deadline, other.owner, counts, other.rows))]

    def _read(self, loan: Loan, entry: LentPages) -> list[Action]:
        """Grant the right to read the filled pages to the debtor."""
        entry.state, entry.deadline = "lent", None
        grant = Grant(entry.right, loan.debtor, entry.rows.astype("<i4").tobytes(), lends=True)
        return [grant, Send(loan.debtor, Filled(loan))]

    def _granted(self, loan: Loan, entry: LentPages) -> Send:
        pages = entry.rows[:, PageRow.PAGE].astype("<i4").tobytes()
        return Send(loan.debtor, Lent(loan, self._incarnation, entry.right.number, pages))

    def _recalled(self, loan: Loan, entry: LentPages, now: Tick, deadline: Tick) -> list[Action]:
        """Recall one loan, unless it is ending or already recalled for an earlier deadline."""
        if entry.state in ("granted", "filling"):
            return self._over(loan, RECALLED)
        is_sooner = entry.deadline is None or deadline < entry.deadline
        if entry.state != "lent" or not is_sooner:
            return []
        if deadline <= now:
            return self._revoked(loan, entry, now)
        entry.deadline = deadline
        entry.patience_ticks = deadline - now
        return [send(entry, Recall(loan, deadline - now), now)]

    def _waits_on(self, entry: LentPages, now: Tick) -> bool:
        """Extend a due recall of pages no longer needed, and return whether to resend it."""
        if entry.state != "lent" or entry.deadline is None or entry.unanswered is None:
            return False
        is_due = min(entry.deadline, entry.unanswered.at) <= now
        if not is_due or self.is_closed or self.is_wanted():
            return False
        entry.patience_ticks = max(entry.patience_ticks, 2 * FIRST_TICKS)
        entry.deadline = max(entry.deadline, now + entry.patience_ticks)
        return True

    def _revoked(self, loan: Loan, entry: LentPages, now: Tick) -> list[Action]:
        """Take the pages of a readable loan."""
        actions: list[Action] = [Revoke(entry.right)]
        self._let_go(entry)
        entry.state, entry.deadline = "revoked", None
        return [*actions, send(entry, Recall(loan, 0), now)]

    @override
    def _over(self, loan: Loan, why: str) -> list[Action]:
        return [*self._ended(loan, self.open[loan]), over(loan.debtor, loan, why)]

    def _ended(self, loan: Loan, entry: LentPages) -> list[Action]:
        """Forget a loan and release its pages, once no pull writes into them."""
        if entry.state == "ending":
            return []
        if entry.filling is not None:
            entry.state, entry.deadline = "ending", None
            return [StopPull(entry.filling)]
        actions: list[Action] = [Revoke(entry.right)] if entry.state == "lent" else []
        if entry.has_pages:
            self._let_go(entry)
        del self.open[loan]
        return actions

    def _let_go(self, entry: LentPages) -> None:
        """Release the pages, unless another loan shares them.

        The caller executes the actions before it allocates pages again.
        """
        self._numbers.free(entry.right.number)
        owners = [o.owner for o in self.open.values() if o is not entry and o.has_pages]
        if entry.owner not in owners:
            self._holds.release(entry.owner)
