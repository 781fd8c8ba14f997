"""Sections that their creditors want back: they come home, or go on to another creditor.

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

    :param placements: of requests that are longer than the memory here.
    :ivar replaced: sections that another creditor has had so far.
    """

    def __init__(
        self, agent: Agent, sections: SectionLoans, placements: Mapping[RequestId, Placement]
    ) -> None:
        self._agent, self._sections, self._placements = agent, sections, placements
        self.replaced = 0

    def moves(self, borrower: Borrower, index: int) -> bool:
        """Whether a section can go elsewhere: nothing is copied home over a connection."""
        return not borrower.by_queries or self._goes_on(borrower, index)

    def recalled(self, borrower: Borrower, index: int) -> list[Action]:
        """A creditor wants a section back: it comes home with all behind it, if that has room.

        Of a request that is longer than the memory here, another creditor gets it.
        """
        if self._goes_on(borrower, index):
            borrower.wanted_back.add(index)
            return self.ask_others(borrower)
        before = borrower.recalled
        borrower.recalled = index if before is None else min(index, before)
        return self._sections.give_back(self._sections.cut(borrower, borrower.away))

    def ask_others(self, borrower: Borrower) -> list[Action]:
        """Ask further creditors for room for sections that are recalled.

        One that none of them takes is lost at the deadline, with all behind it.
        """
        actions: list[Action] = []
        for index in sorted(borrower.wanted_back - borrower.replacing.keys()):
            placement = self._placements[borrower.request.request_id]
            old = borrower.creditor_of[borrower.loans[index]]
            creditor = placement.creditor(index, self._agent.now, without=old)
            if creditor:
                borrower.replacing[index], asked = self._sections.ask(borrower, creditor)
                actions += asked
        return actions

    def take_in(self, borrower: Borrower, news: LoanNews) -> list[Action]:
        """Act on what happened to a loan of a section that another creditor wants back."""
        loan = news.loan
        index = next(at for at, one in borrower.replacing.items() if one == loan)
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
        """Read sections where they are now; returns which, and the loans that are over with it."""
        replaced = sorted(borrower.replaced)
        borrower.replaced.clear()
        self.replaced += len(replaced)
        return replaced, [self._sections.replace(borrower, at) for at in replaced]

    def _goes_on(self, borrower: Borrower, index: int) -> bool:
        """Whether a section goes to another creditor: there is no room for its request here."""
        request = borrower.request
        home_tokens = request.num_tokens - index * self._sections.section_tokens
        return 0 < request.local_tokens < home_tokens
