"""The debtor's side of loans, without I/O.

::

    ASKED ──Lent──► GRANTED ──fill──► FILLING ──Filled──► LENT ──Recall──► LENT until a deadline
      │                └──────────────────┴────────────────┴── give_back, deadline, LoanOver ──┐
      └─ LoanOver, deadline ──► refused                     gone ◄──GivenBack── RETURNING ◄────┘

A loan that *shares* the pages of another is not filled by its user: it says ``Fill`` by itself.

A loan that was granted is forgotten when the creditor has confirmed its end, or has died.  Until
then ``GiveBack`` is said again, so the creditor never holds pages for nobody.

A reader looks at the creditor's word after it has read (:mod:`.transports.rights`): the right may
be gone before this side hears of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvell.mempool.loans.actions import (
    LoanFilled,
    LoanGranted,
    LoanLost,
    LoanRecalled,
    LoanRefused,
)
from kvell.mempool.loans.counts import Counts, by_group, decode_pages, encode_ints
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
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action, Grant, Revoke, Send
from kvell.mempool.transfers.messages import MOST_TICKS, PeerMessage, Transfer
from kvell.mempool.transfers.numbers import RightNumbers
from kvell.mempool.transfers.repeating import Repeated

UNKNOWN = "there is no such loan"


@dataclass(frozen=True)
class Standing:
    """A loan that may be read, as long as the creditor's word for it stands.

    :ivar incarnation: of the creditor.
    :ivar right: number of the word in its rights.
    :ivar pages: of the creditor: for each group, the pages in the order in which they were filled.
    :ivar deadline: when the creditor takes them, in ticks of this instance; None: not recalled.
    """

    creditor: str
    incarnation: int
    right: int
    pages: tuple[Counts, ...]
    deadline: Tick | None


@dataclass
class _Borrowed:
    """One loan of this debtor.

    :ivar deadline: until which it must be filled, or given back; None: there is none.
    :ivar unanswered: what the creditor is to answer next.
    :ivar incarnation: of the creditor; it, ``right`` and ``pages`` come with ``Lent``.
    :ivar filling: the transfer for which the creditor may read pages of this instance; None while
        it fills the loan from another creditor's.
    :ivar shares: whether its pages are another loan's.
    :ivar step_ticks: how long steps take that read it, if it shares.
    """

    creditor: str
    counts: Counts
    deadline: Tick | None
    unanswered: Repeated | None
    state: Literal["asked", "granted", "filling", "lent", "returning"] = "asked"
    incarnation: int = 0
    right: int = 0
    pages: tuple[Counts, ...] = ()
    filling: Transfer | None = None
    shares: bool = False
    step_ticks: Tick = 0


class Borrowing:
    """What one incarnation of an instance borrows from others.

    :param fingerprint: of its layout, which creditors must have too.
    :param numbers: of the incarnation's rights, shared with transfers.
    """

    def __init__(
        self, instance: str, incarnation: int, fingerprint: str, numbers: RightNumbers
    ) -> None:
        self._instance, self._incarnation = instance, incarnation
        self._fingerprint, self._numbers = fingerprint, numbers
        self.lends: Callable[[], bool] = lambda: False
        """Whether the instance lends memory; then it borrows none."""
        self.is_closed = False
        """Whether nothing more is borrowed."""
        self._borrowed: dict[Loan, _Borrowed] = {}
        self._number = 0
        self._now: Tick = 0

    def __len__(self) -> int:
        return len(self._borrowed)

    def __contains__(self, loan: Loan) -> bool:
        return loan in self._borrowed

    @property
    def next_deadline(self) -> Tick | None:
        """When :meth:`tick` has something to do; None while no loan waits for anything."""
        loans = self._borrowed.values()
        ticks = [one.deadline for one in loans if one.deadline is not None]
        repeats = [one.unanswered.at for one in loans if one.unanswered is not None]
        return min(ticks + repeats, default=None)

    def standing(self) -> dict[Loan, Standing]:
        """The loans that may be read, oldest first."""
        return {
            loan: Standing(one.creditor, one.incarnation, one.right, one.pages, one.deadline)
            for loan, one in self._borrowed.items()
            if one.state == "lent"
        }

    def creditor_of(self, loan: Loan) -> tuple[str, int]:
        """Return who lends, and its incarnation; 0 until it has answered.

        :raises KeyError: if the loan is over.
        """
        one = self._borrowed[loan]
        return one.creditor, one.incarnation

    def borrow(
        self, creditor: str, counts: Sequence[int], now: Tick, ticks: Tick, *, model: str = ""
    ) -> tuple[Loan, list[Action]]:
        """Ask an instance for pages; :class:`.LoanGranted` or :class:`.LoanRefused` is the answer.

        ``try_move_kvcache(req_id, num_blocks)`` of Infinite-LLM's Listing 1.

        :param counts: pages of each group, at least one in all.
        :param ticks: milliseconds until which the pages must be filled; at most 20 minutes.
        :raises ValueError: for no pages, or no time.
        """
        if ticks <= 0 or min(counts, default=-1) < 0 or not any(counts):
            raise ValueError("a loan has pages, and time in which they are filled")
        return self._asked(creditor, tuple(counts), now, ticks, model=model)

    def share(
        self, other: Loan, now: Tick, ticks: Tick, *, step_ticks: Tick = 0
    ) -> tuple[Loan, list[Action]]:
        """Ask for the pages of a loan that stands once more; :class:`.LoanFilled`,
        :class:`.LoanRefused` or :class:`.LoanLost` is the answer.

        :param ticks: milliseconds until which the creditor must have answered.
        :param step_ticks: as for :meth:`fill`.
        :raises ValueError: if the other loan does not stand, or for no time.
        """
        of = self._borrowed.get(other)
        if of is None or of.state != "lent" or ticks <= 0:
            raise ValueError(f"{other} does not stand, or there is no time to share it in")
        return self._asked(
            of.creditor, of.counts, now, ticks, shares=other.number, step_ticks=step_ticks
        )

    def fill(
        self,
        loan: Loan,
        pages: Sequence[int],
        source: Standing | None = None,
        *,
        step_ticks: Tick = 0,
    ) -> list[Action]:
        """Let the creditor pull pages into those that it lends; nothing if the loan is over.

        The user keeps them unchanged until :class:`.LoanFilled` or :class:`.LoanLost`, or until it
        gives the loan back.

        :param pages: for each group in order as many as were borrowed.
        :param source: the loan whose pages these are, which another creditor wants back; None if
            they are own ones.
        :param step_ticks: how long steps take that read the loan.
        :raises ValueError: if they are not as many, or the loan is filled already.
        """
        one = self._borrowed.get(loan)
        if one is None or one.state == "returning":
            return []
        if one.state != "granted" or len(pages) != sum(one.counts):
            raise ValueError(f"{loan} does not wait for {len(pages)} pages")
        one.state, encoded = "filling", encode_ints(pages)
        if source is not None:
            of = source.creditor, source.incarnation
            fill = Fill(loan, one.right, source.right, encoded, *of, step_ticks)
            return [self._said(one, fill)]
        transfer = Transfer(self._instance, self._incarnation, self._numbers.take())
        one.filling = transfer
        groups = np.repeat(np.arange(len(one.counts)), one.counts)
        pairs = np.stack([groups, np.asarray(pages)], axis=1).astype("<i4").tobytes()
        fill = Fill(loan, one.right, transfer.number, encoded, step_ticks=step_ticks)
        return [Grant(transfer, one.creditor, pairs), self._said(one, fill)]

    def give_back(self, loan: Loan) -> list[Action]:
        """End a loan, which is not read any more; nothing if it is over."""
        one = self._borrowed.get(loan)
        if one is None or one.state == "returning":
            return []
        if one.state == "asked":
            del self._borrowed[loan]
            return [Send(one.creditor, LoanOver(loan, "it is not wanted any more"))]
        return self._returned(loan, one)

    def lent(self, creditor: str, message: Lent) -> list[Action]:
        """The creditor lends pages."""
        one = self._of(creditor, message.loan)
        if one is None:
            return [_over(creditor, message.loan, UNKNOWN)]
        if one.state != "asked":  # it comes twice, or answers a ``Borrow`` that was doubled
            return []
        pages = decode_pages(message.pages, sum(one.counts))
        if pages is None or message.right < 1:
            problem = "other pages were lent than were asked for"
            return [_over(creditor, message.loan, problem), *self._refused(message.loan, problem)]
        one.state, one.unanswered = "granted", None
        one.incarnation, one.right = message.incarnation, message.right
        one.pages = by_group(pages, one.counts)
        if one.shares:
            one.state = "filling"
            return [
                self._said(one, Fill(message.loan, one.right, 0, b"", step_ticks=one.step_ticks))
            ]
        return [LoanGranted(message.loan)]

    def filled(self, creditor: str, message: Filled) -> list[Action]:
        """The creditor has pulled the pages."""
        one = self._of(creditor, message.loan)
        if one is None:
            return [_over(creditor, message.loan, UNKNOWN)]
        if one.state != "filling":
            return []
        one.state, one.deadline, one.unanswered = "lent", None, None
        return [*self._revoked(one), LoanFilled(message.loan)]

    def recalled(self, creditor: str, message: Recall) -> list[Action]:
        """The creditor wants its pages back, or has taken them."""
        one = self._of(creditor, message.loan)
        if one is None:
            return [_over(creditor, message.loan, UNKNOWN)]
        if one.state in ("asked", "returning"):  # what is unanswered is said again anyway
            return []
        if one.state != "lent" or message.ticks_left <= 0:
            return self._lost(message.loan, one, "it was recalled")
        deadline = self._now + message.ticks_left
        is_sooner = one.deadline is None or deadline < one.deadline
        one.deadline = deadline  # a later one: the creditor does not need them so soon any more
        return [LoanRecalled(message.loan, deadline)] if is_sooner else []

    def given_back(self, creditor: str, message: GivenBack) -> list[Action]:
        """The creditor has the loan no more."""
        one = self._of(creditor, message.loan)
        if one is not None and one.state == "returning":
            del self._borrowed[message.loan]
        return []

    def over(self, creditor: str, message: LoanOver) -> list[Action]:
        """The creditor refuses, or knows no such loan."""
        one = self._of(creditor, message.loan)
        if one is None or one.state == "returning":
            return []
        if one.state == "asked":
            return self._refused(message.loan, message.why)
        return self._lost(message.loan, one, message.why)

    def tick(self, now: Tick) -> list[Action]:
        """End what has passed its deadline, and say again what is not answered."""
        self._now = now
        actions: list[Action] = []
        for loan, one in list(self._borrowed.items()):
            if one.deadline is not None and one.deadline <= now:
                actions += self._late(loan, one)
            elif one.unanswered is not None and one.unanswered.is_due(now):
                actions.append(Send(one.creditor, said_again(one.unanswered, one.deadline, now)))
        return actions

    def instance_died(self, instance: str, incarnation: int) -> list[Action]:
        """An incarnation of an instance, or an earlier one, is no more: its loans are lost.

        :param incarnation: 0: whichever it is.
        """
        actions: list[Action] = []
        for loan, one in list(self._borrowed.items()):
            is_later = 0 < incarnation < one.incarnation
            if one.creditor != instance or is_later:
                continue
            problem = f"{instance} died"
            if one.state == "asked":
                actions += self._refused(loan, problem)
                continue
            del self._borrowed[loan]
            actions += self._revoked(one)
            actions += [] if one.state == "returning" else [LoanLost(loan, problem)]
        return actions

    def audit(self) -> list[str]:
        """Every contradiction in the loans, a sentence for each."""
        found = []
        for loan, one in self._borrowed.items():
            has_pages = tuple(len(some) for some in one.pages) == one.counts
            if has_pages == (one.state == "asked"):
                found.append(f"{loan} is {one.state} with pages {one.pages}")
            if one.filling is not None and one.state != "filling":
                found.append(f"{loan} is {one.state}, and its right to be filled {one.filling}")
            if one.filling is not None and one.filling.number not in self._numbers:
                found.append(f"{loan} is filled for {one.filling}, whose number is free")
            if one.state != "lent" and one.deadline is None and one.unanswered is None:
                found.append(f"{loan} is {one.state} and waits for nothing")
        return found

    def _asked(
        self,
        creditor: str,
        counts: Counts,
        now: Tick,
        ticks: Tick,
        *,
        model: str = "",
        shares: int = 0,
        step_ticks: Tick = 0,
    ) -> tuple[Loan, list[Action]]:
        """A loan that is asked for from now on, unless there is a reason not to."""
        self._number += 1
        loan = Loan(self._instance, self._incarnation, self._number)
        if problem := self._problem(creditor):
            return loan, [LoanRefused(loan, problem)]
        ticks = min(ticks, MOST_TICKS)
        borrow = Borrow(loan, self._fingerprint, encode_ints(counts), ticks, model, shares)
        one = _Borrowed(creditor, counts, now + ticks, Repeated.said(borrow, now))
        one.shares, one.step_ticks = shares > 0, step_ticks
        self._borrowed[loan] = one
        return loan, [Send(creditor, borrow)]

    def _problem(self, creditor: str) -> str:
        if creditor == self._instance:
            return "an instance does not lend to itself"
        if self.is_closed:
            return "the instance is draining"
        if self.lends():
            return "the instance lends memory itself"
        return ""

    def _of(self, creditor: str, loan: Loan) -> _Borrowed | None:
        """A loan, if this creditor has to do with it."""
        one = self._borrowed.get(loan)
        return one if one is not None and one.creditor == creditor else None

    def _said(self, one: _Borrowed, message: PeerMessage) -> Send:
        one.unanswered = Repeated.said(message, self._now)
        return Send(one.creditor, message)

    def _late(self, loan: Loan, one: _Borrowed) -> list[Action]:
        problem = "it was recalled" if one.state == "lent" else "it took too long"
        if one.state == "asked":
            return [_over(one.creditor, loan, problem), *self._refused(loan, problem)]
        return self._lost(loan, one, problem)

    def _refused(self, loan: Loan, problem: str) -> list[Action]:
        """Forget a loan that was asked for.  If it is granted after all, that is answered."""
        del self._borrowed[loan]
        return [LoanRefused(loan, problem)]

    def _lost(self, loan: Loan, one: _Borrowed, problem: str) -> list[Action]:
        return [*self._returned(loan, one), LoanLost(loan, problem)]

    def _returned(self, loan: Loan, one: _Borrowed) -> list[Action]:
        """Say that the pages are not read any more, until that is confirmed."""
        one.state, one.deadline = "returning", None
        return [*self._revoked(one), self._said(one, GiveBack(loan))]

    def _revoked(self, one: _Borrowed) -> list[Action]:
        """The creditor may not read this instance's pages any more, if it might."""
        transfer, one.filling = one.filling, None
        if transfer is None:
            return []
        self._numbers.free(transfer.number)
        return [Revoke(transfer)]


def _over(creditor: str, loan: Loan, why: str) -> Send:
    return Send(creditor, LoanOver(loan, why))
