"""Recalled sections: they are copied back, or move to another creditor.

Pure.  Source: Infinite-LLM §5.2.1, §6.2 (Listing 1).
"""

from collections.abc import Mapping

from kvell.engine.lending.distributed_request import DistributedRequest
from kvell.engine.lending.placement import Placement
from kvell.engine.lending.section_loans import SectionLoans
from kvell.mempool.agent import Agent
from kvell.mempool.loans.actions import LoanFilled, LoanGranted, LoanNews
from kvell.mempool.loans.messages import Loan
from kvell.mempool.transfers.actions import Action
from kvell.vocabulary import RequestId


class Recalls:
    """The recalled sections of one engine core's borrowers.

    :param placements: placements of requests that are longer than the local memory.
    :ivar replaced: number of sections that have moved to another creditor so far.
    """

    def __init__(
        self, agent: Agent, sections: SectionLoans, placements: Mapping[RequestId, Placement]
    ) -> None:
        self._agent, self._sections, self._placements = agent, sections, placements
        self.replaced = 0

    def moves(self, borrower: DistributedRequest, index: int) -> bool:
        """Return whether a recalled section can move; it is not copied back across hosts."""
        return not borrower.by_queries or self._goes_on(borrower, index)

    def on_recall(self, borrower: DistributedRequest, index: int) -> list[Action]:
        """Handle the recall of a section: it is copied back with all later ones, if they fit.

        If the request is too long for the local memory, another creditor gets the section.
        """
        if self._goes_on(borrower, index):
            borrower.sections[index].is_recalled = True
            return self.ask_others(borrower)
        before = borrower.recalled
        borrower.recalled = index if before is None else min(index, before)
        return self._sections.give_back(self._sections.cut(borrower, borrower.away))

    def ask_others(self, borrower: DistributedRequest) -> list[Action]:
        """Request loans for recalled sections from further creditors.

        A section that no creditor takes is lost at the deadline, with all later ones.
        """
        actions: list[Action] = []
        for index in borrower.moving:
            section = borrower.sections[index]
            if section.successor is not None:
                continue
            placement = self._placements[borrower.request.request_id]
            creditor = placement.creditor(index, self._agent.now, without=section.creditor)
            if creditor:
                section.successor, loan_actions = self._sections.ask(borrower, creditor)
                actions += loan_actions
        return actions

    def take_in(self, borrower: DistributedRequest, news: LoanNews) -> list[Action]:
        """Process an event of a loan that replaces a recalled one."""
        loan = news.loan
        section, successor = next(
            (section, section.successor)
            for section in borrower.sections
            if section.successor is not None and section.successor.loan == loan
        )
        if isinstance(news, LoanGranted) and self._sections.is_readable(loan):
            passed_on = self._sections.pass_on(loan, section.loan)
            if passed_on is not None:
                return passed_on
        if isinstance(news, LoanFilled):
            successor.is_copied = True
            return []
        self._placements[borrower.request.request_id].refuses(successor.creditor)
        section.successor = None
        self._sections.forget(loan)
        return self._sections.give_back([loan]) + self.ask_others(borrower)

    def replace(self, borrower: DistributedRequest) -> tuple[list[int], list[Loan]]:
        """Switch filled sections to their new creditors; return them and the loans that end."""
        moved = borrower.moved
        self.replaced += len(moved)
        return moved, [self._sections.replace(borrower, index) for index in moved]

    def _goes_on(self, borrower: DistributedRequest, index: int) -> bool:
        """Return whether a section must move to another creditor: it does not fit here."""
        request = borrower.request
        home_tokens = request.num_tokens - index * self._sections.section_tokens
        return 0 < request.local_tokens < home_tokens
