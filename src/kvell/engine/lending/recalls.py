"""Recalled sections: they are copied back, or move to another creditor.

Pure.  Source: Infinite-LLM §5.2.1, §6.2 (Listing 1).
"""

from collections.abc import Mapping

from kvell.engine.lending.borrower import Borrower
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

    def moves(self, borrower: Borrower, index: int) -> bool:
        """Return whether a recalled section can move; it is not copied back across hosts."""
        return not borrower.by_queries or self._goes_on(borrower, index)

    def on_recall(self, borrower: Borrower, index: int) -> list[Action]:
        """Handle the recall of a section: it is copied back with all later ones, if they fit.

        If the request is too long for the local memory, another creditor gets the section.
        """
        if self._goes_on(borrower, index):
            borrower.wanted_back.add(index)
            return self.ask_others(borrower)
        before = borrower.recalled
        borrower.recalled = index if before is None else min(index, before)
        return self._sections.give_back(self._sections.cut(borrower, borrower.away))

    def ask_others(self, borrower: Borrower) -> list[Action]:
        """Request loans for recalled sections from further creditors.

        A section that no creditor takes is lost at the deadline, with all later ones.
        """
        actions: list[Action] = []
        for index in sorted(borrower.wanted_back - borrower.replacing.keys()):
            placement = self._placements[borrower.request.request_id]
            old = borrower.creditor_of[borrower.loans[index]]
            creditor = placement.creditor(index, self._agent.now, without=old)
            if creditor:
                borrower.replacing[index], loan_actions = self._sections.ask(borrower, creditor)
                actions += loan_actions
        return actions

    def take_in(self, borrower: Borrower, news: LoanNews) -> list[Action]:
        """Process an event of a loan that replaces a recalled one."""
        loan = news.loan
        index = next(at for at, other in borrower.replacing.items() if other == loan)
        if isinstance(news, LoanGranted) and self._sections.is_readable(loan):
            passed_on = self._sections.pass_on(loan, borrower.loans[index])
            if passed_on is not None:
                return passed_on
        if isinstance(news, LoanFilled):
            borrower.replaced.add(index)
            return []
        self._placements[borrower.request.request_id].refuses(borrower.creditor_of[loan])
        del borrower.replacing[index]
        borrower.replaced.discard(index)
        self._sections.forget(borrower, loan)
        return self._sections.give_back([loan]) + self.ask_others(borrower)

    def replace(self, borrower: Borrower) -> tuple[list[int], list[Loan]]:
        """Switch filled sections to their new creditors; return them and the loans that end."""
        replaced = sorted(borrower.replaced)
        borrower.replaced.clear()
        self.replaced += len(replaced)
        return replaced, [self._sections.replace(borrower, at) for at in replaced]

    def _goes_on(self, borrower: Borrower, index: int) -> bool:
        """Return whether a section must move to another creditor: it does not fit here."""
        request = borrower.request
        home_tokens = request.num_tokens - index * self._sections.section_tokens
        return 0 < request.local_tokens < home_tokens
