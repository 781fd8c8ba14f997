"""The debtor's side of loans, without I/O.

::

    ASKED ──Lent──► GRANTED ──fill──► FILLING ──Filled──► LENT ──Recall──► LENT until a deadline
      │                └──────────────────┴────────────────┴── give_back, deadline, LoanOver ──┐
      └─ LoanOver, deadline ──► refused                   ended ◄──GivenBack── RETURNING ◄─────┘

A loan that *shares* the pages of another is not filled by its user: the ledger sends ``Fill``.

A granted loan is forgotten when the creditor has confirmed its end, or has died.  Until then
``GiveBack`` is resent, so the creditor never holds pages without a debtor.

A reader checks the creditor's right after each read (:mod:`.transports.rights`), because the right
may be revoked before this side receives the message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from typing_extensions import override

from kvell.mempool.exchanges import Exchange, ExchangeSide, over, send
from kvell.mempool.loans.actions import (
    RECALLED,
    UNKNOWN,
    Counts,
    LoanFilled,
    LoanGranted,
    LoanLost,
    LoanRecalled,
    LoanRefused,
    by_group,
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
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action, Grant, Revoke, Send
from kvell.mempool.transfers.messages import MOST_TICKS, Transfer
from kvell.mempool.transfers.numbers import RightNumbers


@dataclass
class Debt(Exchange):
    """One loan of this debtor.

    :ivar incarnation: the creditor's; arrives with ``right`` and ``pages`` in ``Lent``.
    :ivar right: the number of the creditor's right.
    :ivar pages: the creditor's pages of each group, in the order in which they were filled.
    :ivar filling: the transfer by which the creditor may read pages of this instance; None if
        the loan is filled from another creditor's pages.
    :ivar shares: whether it shares the pages of another loan.
    :ivar step_ticks: the duration of steps that read it, if it shares.
    """

    counts: Counts
    state: Literal["asked", "granted", "filling", "lent", "returning"] = "asked"
    right: int = 0
    pages: tuple[Counts, ...] = ()
    filling: Transfer | None = None
    shares: bool = False
    step_ticks: Tick = 0


class DebtorLedger(ExchangeSide[Loan, Debt]):
    """The loans of one incarnation of a debtor."""

    def __init__(
        self, instance: str, incarnation: int, fingerprint: str, numbers: RightNumbers
    ) -> None:
        super().__init__()
        self._instance, self._incarnation = instance, incarnation
        self._fingerprint, self._numbers = fingerprint, numbers
        self.lends: Callable[[], bool] = lambda: False
        """Whether the instance lends memory; then it borrows none."""
        self.is_closed = False
        """Whether the instance borrows no more."""
        self.num_filled = 0
        """Number of loans that creditors have filled so far."""
        self.readable: dict[Loan, Debt] = {}
        """The loans that may be read while the creditor's right for them is valid."""
        self._number = 0

    @property
    def is_filling(self) -> bool:
        """Whether creditors are pulling pages of any loan."""
        return any(debt.state == "filling" for debt in self.open.values())

    def is_shared(self, loan: Loan) -> bool:
        """Return whether a loan shares the pages of another; a loan that has ended does not."""
        return loan in self.open and self.open[loan].shares

    def borrow(
        self, creditor: str, counts: Sequence[int], now: Tick, ticks: Tick, *, model: str = ""
    ) -> tuple[Loan, list[Action]]:
        """Ask an instance for pages; :class:`.LoanGranted` or :class:`.LoanRefused` follows.

        ``try_move_kvcache(req_id, num_blocks)`` of Infinite-LLM's Listing 1.

        :param counts: pages of each group, at least one in all.
        :param ticks: milliseconds in which the pages must be filled; at most 20 minutes.
        :raises ValueError: for no pages, or no time.
        """
        if ticks <= 0 or min(counts, default=-1) < 0 or not any(counts):
            raise ValueError("a loan has pages, and time in which they are filled")
        return self._asked(creditor, tuple(counts), now, ticks, model=model)

    def share(
        self, other: Loan, now: Tick, ticks: Tick, *, step_ticks: Tick = 0
    ) -> tuple[Loan, list[Action]]:
        """Ask to share a valid loan; LoanFilled, LoanRefused or LoanLost follows.

        :param ticks: milliseconds in which the creditor must have answered.
        :param step_ticks: as for :meth:`fill`.
        :raises ValueError: if the other loan is not valid, or for no time.
        """
        of = self.open.get(other)
        if of is None or of.state != "lent" or ticks <= 0:
            raise ValueError(f"{other} is not valid, or ends too soon to be shared")
        return self._asked(
            of.peer, of.counts, now, ticks, shares=other.number, step_ticks=step_ticks
        )

    def fill(
        self,
        loan: Loan,
        pages: Sequence[int],
        source: Debt | None = None,
        *,
        step_ticks: Tick = 0,
    ) -> list[Action]:
        """Let the creditor pull pages into the lent ones; no effect if the loan has ended.

        The user keeps the pages unchanged until :class:`.LoanFilled` or :class:`.LoanLost`, or
        until it returns the loan.

        :param pages: as many as were borrowed, in the order of groups.
        :param source: the recalled loan of another creditor that has these pages; None if they are
            local.
        :param step_ticks: the duration of steps that read the loan.
        :raises ValueError: if the number of pages differs, or the loan is filled already.
        """
        debt = self.open.get(loan)
        if debt is None or debt.state == "returning":
            return []
        if debt.state != "granted" or len(pages) != sum(debt.counts):
            raise ValueError(f"{loan} does not wait for {len(pages)} pages")
        debt.state = "filling"
        encoded = np.asarray(pages, "<i4").tobytes()
        if source is not None:
            of = source.peer, source.incarnation
            fill = Fill(loan, debt.right, source.right, encoded, *of, step_ticks)
            return [send(debt, fill, self._now)]
        transfer = Transfer(self._instance, self._incarnation, self._numbers.take())
        debt.filling = transfer
        groups = np.repeat(np.arange(len(debt.counts)), debt.counts)
        pairs = np.stack([groups, np.asarray(pages)], axis=1).astype("<i4").tobytes()
        fill = Fill(loan, debt.right, transfer.number, encoded, step_ticks=step_ticks)
        return [Grant(transfer, debt.peer, pairs), send(debt, fill, self._now)]

    def give_back(self, loan: Loan) -> list[Action]:
        """End a loan that is no longer read; no effect if it has ended."""
        debt = self.open.get(loan)
        if debt is None or debt.state == "returning":
            return []
        if debt.state == "asked":
            del self.open[loan]
            return [Send(debt.peer, LoanOver(loan, "it is no longer needed"))]
        return self._returned(loan, debt)

    def hear(self, creditor: str, message: Lent | Filled | Recall) -> list[Action]:
        """Handle a message of a creditor about a loan that it has."""
        debt = self.of(creditor, message.loan)
        if debt is None:
            return [over(creditor, message.loan, UNKNOWN)]
        if isinstance(message, Lent):
            return self._on_lent(debt, message)
        if isinstance(message, Filled):
            return self._on_filled(debt, message)
        return self._on_recalled(debt, message)

    def _on_lent(self, debt: Debt, message: Lent) -> list[Action]:
        if debt.state != "asked":  # a duplicate, or the answer to a duplicate ``Borrow``
            return []
        pages = decode_pages(message.pages, sum(debt.counts))
        if pages is None or message.right < 1:
            problem = "the lent pages differ from the request"
            return [over(debt.peer, message.loan, problem), *self._refused(message.loan, problem)]
        debt.state, debt.unanswered = "granted", None
        debt.incarnation, debt.right = message.incarnation, message.right
        debt.pages = by_group(pages, debt.counts)
        if debt.shares:
            debt.state = "filling"
            fill = Fill(message.loan, debt.right, 0, b"", step_ticks=debt.step_ticks)
            return [send(debt, fill, self._now)]
        return [LoanGranted(message.loan)]

    def _on_filled(self, debt: Debt, message: Filled) -> list[Action]:
        """Handle the creditor's notice that it has pulled the pages."""
        if debt.state != "filling":
            return []
        debt.state, debt.deadline, debt.unanswered = "lent", None, None
        self.num_filled += 1
        self.readable[message.loan] = debt
        return [*self._revoked(debt), LoanFilled(message.loan)]

    def _on_recalled(self, debt: Debt, message: Recall) -> list[Action]:
        """Handle a recall: the creditor wants its pages back, or has taken them."""
        if debt.state in ("asked", "returning"):  # the unanswered message is resent anyway
            return []
        if debt.state != "lent" or message.ticks_left <= 0:
            return self._lost(message.loan, debt, RECALLED)
        deadline = self._now + message.ticks_left
        is_sooner = debt.deadline is None or deadline < debt.deadline
        debt.deadline = deadline  # a later one: the creditor needs them less urgently
        return [LoanRecalled(message.loan, deadline)] if is_sooner else []

    def given_back(self, creditor: str, message: GivenBack) -> list[Action]:
        debt = self.of(creditor, message.loan)
        if debt is not None and debt.state == "returning":
            del self.open[message.loan]
        return []

    def on_over(self, creditor: str, message: LoanOver) -> list[Action]:
        """Handle the creditor's refusal, or its notice that it has no such loan."""
        debt = self.of(creditor, message.loan)
        if debt is None or debt.state == "returning":
            return []
        if debt.state == "asked":
            return self._refused(message.loan, message.why)
        return self._lost(message.loan, debt, message.why)

    def instance_died(self, instance: str, incarnation: int) -> list[Action]:
        """End the loans of a dead incarnation of a creditor and of earlier ones; 0: of all."""
        actions: list[Action] = []
        problem = f"{instance} died"
        for loan in self.of_instance(instance, incarnation):
            debt = self.open[loan]
            if debt.state == "asked":
                actions += self._refused(loan, problem)
                continue
            del self.open[loan]
            self.readable.pop(loan, None)
            actions += self._revoked(debt)
            actions += [] if debt.state == "returning" else [LoanLost(loan, problem)]
        return actions

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
        """Ask for a loan, or refuse it locally."""
        self._number += 1
        loan = Loan(self._instance, self._incarnation, self._number)
        if problem := self._problem(creditor):
            return loan, [LoanRefused(loan, problem)]
        ticks = min(ticks, MOST_TICKS)
        encoded = np.asarray(counts, "<i4").tobytes()
        borrow = Borrow(loan, self._fingerprint, encoded, ticks, model, shares)
        debt = Debt(creditor, now + ticks, counts, shares=shares > 0, step_ticks=step_ticks)
        self.open[loan] = debt
        return loan, [send(debt, borrow, now)]

    def _problem(self, creditor: str) -> str:
        if creditor == self._instance:
            return "an instance does not lend to itself"
        if self.is_closed:
            return "the instance is draining"
        if self.lends():
            return "the instance lends memory itself"
        return ""

    @override
    def _over(self, loan: Loan, why: str) -> list[Action]:
        debt = self.open[loan]
        if debt.state == "asked":
            return [over(debt.peer, loan, why), *self._refused(loan, why)]
        return self._lost(loan, debt, RECALLED if debt.state == "lent" else why)

    def _refused(self, loan: Loan, problem: str) -> list[Action]:
        del self.open[loan]
        return [LoanRefused(loan, problem)]

    def _lost(self, loan: Loan, debt: Debt, problem: str) -> list[Action]:
        return [*self._returned(loan, debt), LoanLost(loan, problem)]

    def _returned(self, loan: Loan, debt: Debt) -> list[Action]:
        debt.state, debt.deadline = "returning", None
        self.readable.pop(loan, None)
        return [*self._revoked(debt), send(debt, GiveBack(loan), self._now)]

    def _revoked(self, debt: Debt) -> list[Action]:
        """Revoke the creditor's right to read this instance's pages, if it has one."""
        transfer, debt.filling = debt.filling, None
        if transfer is None:
            return []
        self._numbers.free(transfer.number)
        return [Revoke(transfer)]
