"""The creditor's side of loans, without I/O.

::

    Borrow ──► GRANTED ──Fill──► FILLING ──pulled──► LENT ──recall──► LENT until a deadline
      │           └─ deadline, recall ─┐ └─ deadline, recall   └─ GiveBack ──► gone      │
      └─ refused                       ▼    ▼                                            ▼
                                     gone ◄─ ENDING, while somebody writes    gone ◄─ REVOKED

Memory is lent first come, first served.  A reservation that is not filled ends at its deadline,
and at once if it is recalled: the debtor still has its own pages.  A loan that is read has no
deadline until it is recalled.  The right to read is granted when the pages are filled, and revoked
before they are given to others.  A revoked loan has no pages, and is remembered until the debtor
has answered, so that the debtor learns of it whatever gets lost.

A loan that *shares* the pages of another goes from GRANTED to LENT without being filled.  What is
recalled of shared pages is recalled from all who share them.

Source: Infinite-LLM §5.2.2 and §6.2.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kvell.mempool.holds import Holds
from kvell.mempool.loans.counts import Counts, decode_counts, decode_pages, encode_ints
from kvell.mempool.loans.lent_audit import lent_problems
from kvell.mempool.loans.lent_pages import LentPages, pages_of, together
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
from kvell.mempool.loans.repeats import said_again
from kvell.mempool.owners import Owner, Tick
from kvell.mempool.transfers.actions import Action, Grant, Pull, Revoke, Send, StopPull
from kvell.mempool.transfers.messages import MOST_TICKS, Transfer
from kvell.mempool.transfers.numbers import SLOTS, RightNumbers
from kvell.mempool.transfers.receiving import FOREVER
from kvell.mempool.transfers.repeating import FIRST_TICKS, Repeated

UNKNOWN = "there is no such loan"
RECALLED = "it was recalled"
TOO_LONG = "it took too long"
MOST_STEP_TICKS: Tick = 30_000
"""A debtor whose steps take longer may lose what it reads."""
NO_ROOM = "there is no room"
MOST_LOANS = SLOTS // 2
"""Loans that stand at once, of all debtors: transfers need words of rights too."""


class Lending:
    """What one incarnation of an instance lends to others.

    :param fingerprint: of its layout, which debtors must have too.
    :param holds: of the instance; a loan's hold has owner kind ``loan``.
    :param numbers: of the incarnation's rights, shared with transfers.
    :param most_lent: pages of each group that are lent at most, 0 for one that is never lent.
    :param most_loans: of one debtor; further ones are refused.
    """

    def __init__(
        self,
        instance: str,
        incarnation: int,
        fingerprint: str,
        holds: Holds,
        numbers: RightNumbers,
        most_lent: Sequence[int],
        most_loans: int,
    ) -> None:
        self._instance, self._incarnation = instance, incarnation
        self._fingerprint, self._holds, self._numbers = fingerprint, holds, numbers
        self._most_lent, self._most_loans = tuple(most_lent), most_loans
        self.borrows: Callable[[], bool] = lambda: False
        """Whether the instance borrows memory; then it lends none."""
        self.is_wanted: Callable[[], bool] = lambda: True
        """Whether the instance still wants back what it recalled; while it does not, it waits."""
        self.is_other_pull: Callable[[Transfer], bool] = lambda _transfer: False
        """Whether a transfer brings a text here: it cannot fill a loan too."""
        self.is_closed = False
        """Whether nothing more is lent."""
        self._lent: dict[Loan, LentPages] = {}
        self._pulls: dict[Transfer, Loan] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def __contains__(self, transfer: Transfer) -> bool:
        """Whether a loan is being filled by a transfer."""
        return transfer in self._pulls

    @property
    def lends(self) -> bool:
        """Whether any pages are lent."""
        return any(one.has_pages for one in self._lent.values())

    @property
    def next_deadline(self) -> Tick | None:
        """When :meth:`tick` has something to do; None while no loan waits for anything."""
        loans = self._lent.values()
        ticks = [one.deadline for one in loans if one.deadline is not None]
        repeats = [one.unanswered.at for one in loans if one.unanswered is not None]
        return min(ticks + repeats, default=None)

    def pages_lent(self) -> dict[str, Counts]:
        """Return for each debtor how many pages of each group it has, for figures."""
        debtors = sorted({loan.debtor for loan, one in self._lent.items() if one.has_pages})
        return {
            debtor: self._sum(one for loan, one in self._lent.items() if loan.debtor == debtor)
            for debtor in debtors
        }

    def pages(self) -> set[tuple[int, int]]:
        """(group, page) of all that is lent."""
        lent = [one.rows for one in self._lent.values() if one.has_pages]
        return {(group, page) for rows in lent for group, page in rows.tolist()}

    def borrow(self, debtor: str, message: Borrow, now: Tick) -> list[Action]:
        """Hold empty pages for a debtor, or refuse.

        The answer to ``try_move_kvcache`` of Infinite-LLM's Listing 1.
        """
        loan = message.loan
        if loan in self._lent and loan.debtor == debtor:  # it is said again
            one = self._lent[loan]
            return [self._granted(loan, one)] if one.state == "granted" else []
        counts = decode_counts(message.counts, len(self._most_lent))
        problem = self._problem(debtor, message)
        if problem or counts is None:
            return [_over(debtor, loan, problem or "there are no such pages")]
        deadline = now + min(message.ticks_left, MOST_TICKS)
        if message.shares:
            return self._shared(message, counts, deadline)
        lent = self._sum(self._lent.values())
        limits = zip(lent, counts, self._most_lent, strict=True)
        if any(wanted and had + wanted > most for had, wanted, most in limits):
            return [_over(debtor, loan, NO_ROOM)]
        owner = Owner("loan", loan.debtor, loan.incarnation, loan.number)
        try:
            hold = self._holds.hold_pages(
                owner, FOREVER, np.asarray(counts, np.int32), model=message.model
            )
        except ValueError as error:
            return [_over(debtor, loan, str(error))]
        if hold is None:
            return [_over(debtor, loan, NO_ROOM)]
        places = sorted(self._holds.places(owner).items())
        rows = np.asarray([(group, page) for (group, _), page in places], np.int32)
        one = self._lent[loan] = LentPages(owner, counts, rows, self._right(), deadline)
        return [self._granted(loan, one)]

    def fill(self, debtor: str, message: Fill) -> list[Action]:
        """Begin to pull the debtor's pages, or those that another creditor lends it."""
        loan = message.loan
        one = self._of(debtor, loan)
        if one is None or message.right != one.right.number or one.state in ("ending", "revoked"):
            return [_over(debtor, loan, UNKNOWN)]
        if one.state == "lent":  # the answer got lost
            return [Send(debtor, Filled(loan))]
        if one.state == "filling":
            return []
        one.step_ticks = max(0, min(message.step_ticks, MOST_STEP_TICKS))
        if one.shares:
            return self._read(loan, one)
        pages = decode_pages(message.pages, len(one.rows))
        of = (message.source, message.incarnation) if message.source else (debtor, loan.incarnation)
        transfer = Transfer(*of, message.number)
        is_taken = transfer in self._pulls or self.is_other_pull(transfer)
        if pages is None or message.number < 1 or is_taken or message.source == self._instance:
            problem = "it cannot be filled from these pages"
            return [*self._ended(loan, one), _over(debtor, loan, problem)]
        one.state, one.filling = "filling", transfer
        self._pulls[transfer] = loan
        rows = np.insert(one.rows, 1, np.asarray(pages, np.int32), axis=1)
        return [Pull(transfer, np.ascontiguousarray(rows, np.int32))]

    def pulled(self, transfer: Transfer, problem: str) -> list[Action]:
        """Copying has ended.

        :param problem: "" if everything was copied and the right to read still stood then.
        """
        loan = self._pulls.pop(transfer)
        one = self._lent[loan]
        one.filling = None
        if one.state == "ending" or problem:
            over = [] if one.state == "ending" else [_over(loan.debtor, loan, problem)]
            self._let_go(one)
            del self._lent[loan]
            return list(over)
        return self._read(loan, one)

    def given_back(self, debtor: str, message: GiveBack) -> list[Action]:
        """The debtor does not read the pages any more."""
        if message.loan.debtor != debtor:
            return [_over(debtor, message.loan, UNKNOWN)]
        one = self._lent.get(message.loan)
        ended = [] if one is None else self._ended(message.loan, one)
        return [*ended, Send(debtor, GivenBack(message.loan))]

    def over(self, debtor: str, message: LoanOver) -> list[Action]:
        """The debtor knows no such loan."""
        one = self._of(debtor, message.loan)
        return [] if one is None else self._ended(message.loan, one)

    def recall(self, counts: Sequence[int], now: Tick, ticks: Tick) -> list[Action]:
        """Get back so many pages of each group, counting those that are on their way back.

        Loans that were never filled go first, and end at once.  Then the youngest are recalled,
        and revoked at a deadline unless they are given back before it.

        :param counts: pages of each group.
        :param ticks: milliseconds until the deadline; 0: they are revoked at once.  A debtor whose
            steps take long has two of them.
        """
        missing = np.asarray(counts)
        staying: list[list[tuple[Loan, LentPages]]] = []
        for loans in together(self._lent):
            some = [(loan, self._lent[loan]) for loan in loans]
            if all(one.is_ending for _, one in some):
                missing = missing - some[0][1].counts
            else:
                staying.append(some)
        actions: list[Action] = []
        for some in staying:
            if (missing <= 0).all():
                break
            if np.logical_and(missing > 0, some[0][1].counts).any():
                missing = missing - some[0][1].counts
                for loan, one in some:
                    patience = max(ticks, 2 * one.step_ticks) if ticks else 0
                    actions += self._recalled(loan, one, now, now + patience)
        return actions

    def recall_all(self, now: Tick, ticks: Tick) -> list[Action]:
        """Get back all pages; the deadline of an earlier recall can move forward, never back.

        :param ticks: milliseconds until the deadline; 0: loans are revoked at once.
        """
        loans = [one for some in together(self._lent) for one in some]
        return [a for one in loans for a in self._recalled(one, self._lent[one], now, now + ticks)]

    def tick(self, now: Tick) -> list[Action]:
        """End what has passed its deadline, and say again what is not answered."""
        actions: list[Action] = []
        for loan, one in list(self._lent.items()):
            if self._waits_on(one, now):
                actions.append(self._said(loan, one, now, one.patience_ticks))
            elif one.deadline is not None and one.deadline <= now:
                actions += self._late(loan, one, now)
            elif one.unanswered is not None and one.unanswered.is_due(now):
                actions.append(Send(loan.debtor, said_again(one.unanswered, one.deadline, now)))
        return actions

    def instance_died(self, instance: str, incarnation: int) -> list[Action]:
        """An incarnation of an instance, or an earlier one, is no more: what it borrowed is free.

        :param incarnation: 0: whichever it is.
        """
        gone = [
            loan
            for loan in self._lent
            if loan.debtor == instance and not 0 < incarnation < loan.incarnation
        ]
        return [action for loan in gone for action in self._ended(loan, self._lent[loan])]

    def audit(self) -> list[str]:
        """Every contradiction between loans and holds, a sentence for each."""
        problems = lent_problems(self._lent, self._pulls, self._holds, self._numbers)
        lent = self._sum(self._lent.values())
        if any(had > most for had, most in zip(lent, self._most_lent, strict=True)):
            problems.append(f"{lent} pages are lent, more than {self._most_lent}")
        return problems

    def _problem(self, debtor: str, message: Borrow) -> str:
        if message.loan.debtor != debtor:
            return "it is in another instance's name"
        if message.fingerprint != self._fingerprint:
            return "the layouts of the two instances differ"
        if self.is_closed:
            return "the instance is draining"
        if self.borrows():
            return "the instance borrows memory itself"
        if message.ticks_left <= 0:
            return "its time is over"
        of_debtor = sum(loan.debtor == debtor for loan in self._lent)
        if of_debtor >= self._most_loans or len(self._lent) >= MOST_LOANS:
            return "too many loans stand"
        return ""

    def _of(self, debtor: str, loan: Loan) -> LentPages | None:
        """A loan, if it is this debtor's."""
        return self._lent.get(loan) if loan.debtor == debtor else None

    def _sum(self, loans: Iterable[LentPages]) -> Counts:
        return pages_of(loans, len(self._most_lent))

    def _right(self) -> Transfer:
        return Transfer(self._instance, self._incarnation, self._numbers.take())

    def _shared(self, message: Borrow, counts: Counts, deadline: Tick) -> list[Action]:
        """Lend the pages of a loan once more, unless they are wanted back."""
        loan = message.loan
        other = self._lent.get(Loan(loan.debtor, loan.incarnation, message.shares))
        if other is None or other.counts != counts or other.state != "lent" or other.is_ending:
            return [_over(loan.debtor, loan, UNKNOWN)]
        one = LentPages(other.owner, counts, other.rows, self._right(), deadline, shares=True)
        self._lent[loan] = one
        return [self._granted(loan, one)]

    def _read(self, loan: Loan, one: LentPages) -> list[Action]:
        """The pages are filled: the debtor may read them from now on."""
        one.state, one.deadline = "lent", None
        grant = Grant(one.right, loan.debtor, one.rows.astype("<i4").tobytes(), lends=True)
        return [grant, Send(loan.debtor, Filled(loan))]

    def _granted(self, loan: Loan, one: LentPages) -> Send:
        pages = encode_ints(one.rows[:, 1].tolist())
        return Send(loan.debtor, Lent(loan, self._incarnation, one.right.number, pages))

    def _recalled(self, loan: Loan, one: LentPages, now: Tick, deadline: Tick) -> list[Action]:
        """Recall one loan, unless it is ending, or was recalled for an earlier deadline."""
        if one.state in ("granted", "filling"):
            return [*self._ended(loan, one), _over(loan.debtor, loan, RECALLED)]
        is_sooner = one.deadline is None or deadline < one.deadline
        if one.state != "lent" or not is_sooner:
            return []
        if deadline <= now:
            return self._revoked(loan, one, now)
        one.deadline, one.patience_ticks = deadline, deadline - now
        return [self._said(loan, one, now, deadline - now)]

    def _waits_on(self, one: LentPages, now: Tick) -> bool:
        """Leave the debtor more time if nobody here needs the pages; returns whether it is to hear
        of that: when the recall would be said again, or has passed its deadline."""
        if one.state != "lent" or one.deadline is None or one.unanswered is None:
            return False
        is_due = min(one.deadline, one.unanswered.at) <= now
        if not is_due or self.is_closed or self.is_wanted():
            return False
        one.patience_ticks = max(one.patience_ticks, 2 * FIRST_TICKS)
        one.deadline = max(one.deadline, now + one.patience_ticks)
        return True

    def _late(self, loan: Loan, one: LentPages, now: Tick) -> list[Action]:
        if one.state == "lent":
            return self._revoked(loan, one, now)
        return [*self._ended(loan, one), _over(loan.debtor, loan, TOO_LONG)]

    def _revoked(self, loan: Loan, one: LentPages, now: Tick) -> list[Action]:
        """Take the pages of a loan that is read."""
        actions: list[Action] = [Revoke(one.right)]
        self._let_go(one)
        one.state, one.deadline = "revoked", None
        return [*actions, self._said(loan, one, now, 0)]

    def _said(self, loan: Loan, one: LentPages, now: Tick, ticks_left: Tick) -> Send:
        recall = Recall(loan, ticks_left)
        one.unanswered = Repeated.said(recall, now)
        return Send(loan.debtor, recall)

    def _ended(self, loan: Loan, one: LentPages) -> list[Action]:
        """Forget a loan and give its pages back, once nobody writes into them."""
        if one.state == "ending":
            return []
        if one.filling is not None:
            one.state, one.deadline = "ending", None
            return [StopPull(one.filling)]
        actions: list[Action] = [Revoke(one.right)] if one.state == "lent" else []
        if one.has_pages:
            self._let_go(one)
        del self._lent[loan]
        return actions

    def _let_go(self, one: LentPages) -> None:
        """Release the pages, unless another loan has them too.

        The caller carries the actions out before anybody else gets them.
        """
        self._numbers.free(one.right.number)
        owners = [o.owner for o in self._lent.values() if o is not one and o.has_pages]
        if one.owner not in owners:
            self._holds.release(one.owner)


def _over(debtor: str, loan: Loan, why: str) -> Send:
    return Send(debtor, LoanOver(loan, why))
