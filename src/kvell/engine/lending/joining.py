"""Requests that go on behind sections which lie at creditors for another one over the same text.

::

    submitted ──the loans are shared──► JOINING ──all are answered──► waits in line behind them
        │                                  └── none stands any more ──┐
        └── nobody borrows more of its text than is cached here ──────┴► waits in line

So a prefix is hit that is in nobody's cache, and neither memory nor time is needed for it: the
request attends to what its creditors have.  Each request has rights of its own, so it does not
matter which of them ends first, and what is recalled is lost by each alone.  Pure.

Source: DESIGN.md §15.9; loans of :mod:`kvell.mempool.loans` with ``Borrow.shares``.
"""

from collections.abc import Callable, Iterable

from kvell.engine.lending.borrower import Borrower
from kvell.engine.lending.section_loans import SectionLoans
from kvell.engine.requests.request import Request
from kvell.memory import common_prefix
from kvell.mempool.loans.actions import LoanFilled, LoanNews
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action
from kvell.vocabulary import RequestId

JOIN_TICKS: Tick = 2_000
"""How long a request waits for its creditors at most."""
NEVER_HELD = -1
"""Handle of a borrower that has had no pages here so far."""


class JoiningRequests:
    """The joining requests of one engine core.

    :param cached: how many of a request's first tokens are cached here.
    :ivar shared: sections that requests have gone on behind so far.
    """

    def __init__(self, sections: SectionLoans, cached: Callable[[Request], int]) -> None:
        self._sections, self._cached = sections, cached
        self._joining: dict[RequestId, Borrower] = {}
        self._answered: list[Borrower] = []
        self.shared = 0

    def __contains__(self, request: Request) -> bool:
        """Whether a request waits for its creditors."""
        return request.request_id in self._joining

    def __len__(self) -> int:
        return len(self._joining)

    def begin(self, request: Request, others: Iterable[Borrower]) -> list[Action]:
        """Share the loans of whoever has most of a new request's text elsewhere.

        :param others: that borrow here.
        :returns: nothing if none has more of it than is cached.
        """
        most, best = 0, None
        for other in others:
            count = self._common(request, other)
            if count > most:
                most, best = count, other
        if best is None or most * self._sections.section_tokens <= self._cached(request):
            return []
        borrower = Borrower(request, NEVER_HELD, by_queries=best.by_queries)
        self._joining[request.request_id] = borrower
        actions: list[Action] = []
        for loan in best.loans[:most]:
            shared, asked = self._sections.share(borrower, loan, JOIN_TICKS)
            borrower.loans.append(shared)
            actions += asked
        return actions

    def take_in(self, borrower: Borrower, news: LoanNews) -> list[Action]:
        """Act on what happened to a loan; :meth:`take_answered` when it was the last."""
        actions: list[Action] = []
        if isinstance(news, LoanFilled):
            self._sections.note_filled(borrower)
        else:
            cut = self._sections.cut(borrower, borrower.loans.index(news.loan))
            actions = self._sections.give_back(cut)
        if borrower.filled == len(borrower.loans):
            del self._joining[borrower.request.request_id]
            borrower.away = borrower.filled
            borrower.request.kept_tokens = borrower.away * self._sections.section_tokens
            self.shared += borrower.away
            self._answered.append(borrower)
        return actions

    def take_answered(self) -> list[Borrower]:
        """Return those that wait for nothing any more: with what they share, or without loans."""
        answered, self._answered = self._answered, []
        return answered

    def end(self, request: Request) -> list[Action]:
        """A request ends that may still be joining."""
        borrower = self._joining.get(request.request_id)
        if borrower is None or borrower.request is not request:
            return []  # a later attempt at it may join, while this one's last step ends
        del self._joining[request.request_id]
        return self._sections.give_back(self._sections.cut(borrower, 0))

    def audit(self) -> list[str]:
        """Every contradiction in the loans of those that join, a sentence for each."""
        tokens = self._sections.section_tokens
        return [
            problem
            for one in self._joining.values()
            for problem in (*one.audit(tokens), *self._sections.audit(one))
        ]

    def _common(self, request: Request, other: Borrower) -> int:
        """How many sections both texts have in common that stand, and are not wanted back."""
        of, tokens = other.request, self._sections.section_tokens
        if (of.model, of.cache_root) != (request.model, request.cache_root) or of.image_rows:
            return 0
        first_gone = self._sections.first_lost(other)
        most = other.away if first_gone is None else min(other.away, first_gone)
        mine, its = request.tokens(0, request.num_tokens - 1), of.tokens(0, most * tokens)
        return common_prefix(mine, its) // tokens
