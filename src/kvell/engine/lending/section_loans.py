"""The loans of borrowing requests, one for each section."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from kvell.engine.lending.distributed_request import (
    DistributedRequest,
    Place,
    RemoteSection,
    Sections,
)
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.requests.plan import BorrowedPages, NewPages
from kvell.mempool.agent import Agent
from kvell.mempool.loans.messages import Loan
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action

GRANT_TICKS: Tick = 30_000
"""Longest time from a creditor's grant until a section is offered to it."""


class SectionLoans:
    """The loans of all borrowers of an instance: requested, filled and given back here.

    :ivar section_tokens: tokens in a section.
    :ivar step_ticks: duration of the longest recent step.
    """

    def __init__(self, agent: Agent, section_tokens: int) -> None:
        self._agent, self._loans = agent, agent.loans.borrowing
        self._core = agent.core
        self.section_tokens = section_tokens
        self.step_ticks = 0
        self._borrowers: dict[Loan, DistributedRequest] = {}
        self._begun_at: Tick = agent.now

    @property
    def instance(self) -> str:
        return self._agent.instance

    def begin_step(self) -> None:
        self._begun_at = self._agent.now

    def end_step(self) -> None:
        """Measure a step that has ended; a wait for memory between two steps is none."""
        took_ticks = self._agent.now - self._begun_at
        self.step_ticks = max(took_ticks, self.step_ticks * 7 // 8)

    def borrower(self, loan: Loan) -> DistributedRequest | None:
        """Return the borrower of a loan; None if the loan has ended."""
        return self._borrowers.get(loan)

    def ask(
        self, borrower: DistributedRequest, creditor: str
    ) -> tuple[RemoteSection, list[Action]]:
        """Request a loan for a section; even an immediate answer arrives as ``LoanNews``."""
        model = borrower.request.model
        counts = self._sections(borrower).page_counts()
        loan, actions = self._loans.borrow(
            creditor, counts, self._agent.now, GRANT_TICKS, model=model
        )
        self._borrowers[loan] = borrower
        return RemoteSection(creditor, loan), actions

    def share(
        self, borrower: DistributedRequest, other: RemoteSection, ticks: Tick
    ) -> tuple[RemoteSection, list[Action]]:
        """Request a second loan of the pages of a valid one; the answer arrives as ``LoanNews``.

        :param ticks: the time limit of the answer.
        """
        loan, actions = self._loans.share(
            other.loan, self._agent.now, ticks, step_ticks=self.step_ticks
        )
        self._borrowers[loan] = borrower
        return RemoteSection(other.creditor, loan), actions

    def is_readable(self, loan: Loan) -> bool:
        """Return whether attention can read a loan, in place or by queries to the creditor.

        All sections of a request are read in the same way.
        """
        creditor = self._loans.creditor_of(loan)
        borrower = self._borrowers[loan]
        models = self._agent.asked_models
        is_answered = models is None or borrower.request.model in models
        asks = is_answered and creditor in self._agent.answering
        reads = creditor in self._agent.neighbours
        if not borrower.away:
            borrower.by_queries = asks
        return asks if borrower.by_queries else reads

    def let_pull(self, borrower: DistributedRequest, section: int) -> list[Action]:
        """Let a creditor pull a section from this instance."""
        held = self._core.held_pages(borrower.handle)
        pages = self._sections(borrower).own(held, section)
        loan = borrower.sections[section].loan
        return self._loans.fill(loan, pages, step_ticks=self.step_ticks)

    def pass_on(self, loan: Loan, source: Loan) -> list[Action] | None:
        """Let a creditor pull a section from the creditor that recalls it; None if it is too late.

        :param source: the recalled loan.
        """
        readable = self._loans.readable.get(source)
        if readable is None:
            return None
        pages = list(chain(*readable.pages))
        return self._loans.fill(loan, pages, readable, step_ticks=self.step_ticks)

    def cut_moved(self, borrower: DistributedRequest, rows: NewPages) -> list[Action]:
        """End loans that creditors fill from pages that a step moves; they are requested again.

        :param rows: new pages of the plan, [m, 4].  The actions are executed before its step runs.
        """
        filling = range(borrower.filled, len(borrower.sections))
        local = rows[rows[:, 0] == borrower.handle] if filling else rows[:0]
        moved = [number for number in self._sections(borrower).of_rows(local) if number in filling]
        return self.give_back(self.cut(borrower, min(moved))) if moved else []

    def note_filled(self, borrower: DistributedRequest) -> None:
        """Update the number of first sections that may be read."""
        readable = self._loans.readable
        while borrower.filled < len(borrower.sections):
            if borrower.sections[borrower.filled].loan not in readable:
                break
            borrower.filled += 1

    def replace(self, borrower: DistributedRequest, section: int) -> Loan:
        """Switch a section to its loan from another creditor; return the loan that ends."""
        old = borrower.sections[section]
        assert old.successor is not None, "it has moved"
        borrower.sections[section] = old.successor
        self.forget(old.loan)
        return old.loan

    def forget(self, loan: Loan) -> None:
        """Forget a loan that has no section any more."""
        del self._borrowers[loan]

    def cut(self, borrower: DistributedRequest, section: int) -> list[Loan]:
        """Remove the loans of ``section`` and later ones; the caller gives them back."""
        loans = borrower.cut(section)
        for loan in loans:
            self.forget(loan)
        return loans

    def give_back(self, loans: Sequence[Loan]) -> list[Action]:
        return [action for loan in loans for action in self._loans.give_back(loan)]

    def rows(
        self, borrower: DistributedRequest, sections: Iterable[int]
    ) -> list[tuple[int, int, int, int]]:
        """Return the table rows of sections read in place: handle, group, position, page."""
        if borrower.by_queries:
            return []
        return [
            (borrower.handle, *place, page)
            for index in sections
            for place, page in self.beyond(borrower, index).items()
        ]

    def first_lost(self, borrower: DistributedRequest) -> int | None:
        """Return the first section that is lost or recalled; None if none is, as far as known."""
        readable = self._loans.readable
        gone = [
            at
            for at, section in enumerate(borrower.sections[: borrower.away])
            if section.loan not in readable
        ]
        recalled = [] if borrower.recalled is None else [borrower.recalled]
        return min([*gone, *borrower.moving, *recalled], default=None)

    def beyond(self, borrower: DistributedRequest, section: int) -> dict[Place, int]:
        """Return a creditor's pages of a section, numbered as pages after the own pool."""
        readable = self._loans.readable[borrower.sections[section].loan]
        first = self._agent.neighbours[readable.creditor, readable.incarnation]
        return self._sections(borrower).beyond(readable.pages, first, section)

    def rights(self, borrower: DistributedRequest) -> list[BorrowedPages]:
        """Return the rights that must be valid until a step that computes the request has ended."""
        readable = self._loans.readable
        away = [section.loan for section in borrower.sections[: borrower.away]]
        loans = [*away, *(borrower.ends if borrower.returning else ())]
        rights = [readable.get(loan) for loan in loans]
        # Encode a revoked right as invalid, so that the row is missed.
        rows = [("", 0, 0) if r is None else (r.creditor, r.incarnation, r.right) for r in rights]
        return [BorrowedPages(borrower.handle, *row, borrower.by_queries) for row in rows]

    def asked_for(self, borrower: DistributedRequest) -> list[tuple[int, int]]:
        """Return handle and tokens of a request whose first tokens are in no page of its tables."""
        is_asked = borrower.by_queries and borrower.away
        return [(borrower.handle, borrower.away * self.section_tokens)] if is_asked else []

    def placed(self, borrower: DistributedRequest) -> list[RequestPlacementEntry]:
        """Return where a request's sections are; those on their way count as remote."""
        request = borrower.request
        counts = Counter(section.creditor for section in borrower.sections)
        here = -(-request.num_tokens // self.section_tokens) - borrower.away
        name, debtor = request.request_id, self.instance
        away = [RequestPlacementEntry(name, *item, local=False) for item in counts.items()]
        return [RequestPlacementEntry(name, debtor, here, local=True), *away]

    def audit(self, borrower: DistributedRequest) -> list[str]:
        """Return all contradictions in the loans of a request, one sentence each."""
        successors = (section.successor for section in borrower.sections)
        sections = (*borrower.sections, *filter(None, successors))
        name = borrower.request.request_id
        problems = [
            f"{name}: {section.loan} is not its"
            for section in sections
            if self.borrower(section.loan) is not borrower
        ]
        problems += [
            f"{name}: {section.loan} has a successor and is not recalled"
            for section in borrower.sections
            if section.successor is not None and not section.is_recalled
        ]
        return problems

    def _sections(self, borrower: DistributedRequest) -> Sections:
        return Sections(borrower.request.model, self._core.layout.groups, self.section_tokens)
