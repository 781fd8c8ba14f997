"""Requests that share the remote sections of another request with the same text.

::

    submitted ──the loans are shared──► JOINING ──all are answered──► queued, continues after them
        │                                  └── none is valid any more ┐
        └── no request borrows more of its text than is cached here ──┴► queued

So a request hits a prefix that is in no cache, and needs neither memory nor time for it: it attends
to the creditors' pages.  Each request has its own rights, so the requests may end in any order, and
each handles recalls alone.  Pure.

Source: DESIGN.md §15.9; loans of :mod:`kvell.mempool.loans` with ``Borrow.shares``.
"""

from collections.abc import Callable, Iterable

from kvell.engine.lending.distributed_request import DistributedRequest
from kvell.engine.lending.section_loans import SectionLoans
from kvell.engine.requests.request import Request
from kvell.memory import common_prefix
from kvell.mempool.loans.actions import LoanFilled, LoanNews
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action
from kvell.vocabulary import RequestId

JOIN_TICKS: Tick = 2_000
"""Longest time that a request waits for its creditors."""
NEVER_HELD = -1
"""Handle of a borrower that has had no pages here so far."""


class JoiningRequests:
    """The joining requests of one engine core.

    :param cached: returns how many of a request's first tokens are cached here.
    :ivar shared: number of sections that requests have shared so far.
    """

    def __init__(self, sections: SectionLoans, cached: Callable[[Request], int]) -> None:
        self._sections, self._cached = sections, cached
        self._joining: dict[RequestId, DistributedRequest] = {}
        self._answered: list[DistributedRequest] = []
        self.shared = 0

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._joining

    def __len__(self) -> int:
        return len(self._joining)

    def begin(self, request: Request, others: Iterable[DistributedRequest]) -> list[Action]:
        """Share the loans of the borrower with most of a new request's text.

        :param others: the borrowers of this instance.
        :returns: empty if no borrower has more of the text than is cached.
        """
        best_count, best = 0, None
        for other in others:
            count = self._common(request, other)
            if count > best_count:
                best_count, best = count, other
        if best is None or best_count * self._sections.section_tokens <= self._cached(request):
            return []
        borrower = DistributedRequest(request, NEVER_HELD, by_queries=best.by_queries)
        self._joining[request.request_id] = borrower
        actions: list[Action] = []
        for section in best.sections[:best_count]:
            shared, loan_actions = self._sections.share(borrower, section, JOIN_TICKS)
            borrower.sections.append(shared)
            actions += loan_actions
        return actions

    def take_in(self, borrower: DistributedRequest, news: LoanNews) -> list[Action]:
        """Process an event of a loan; after the last, :meth:`take_answered` has the borrower."""
        actions: list[Action] = []
        if isinstance(news, LoanFilled):
            self._sections.note_filled(borrower)
        else:
            index = borrower.index_of(news.loan)
            assert index is not None, "its loans have no successors yet"
            actions = self._sections.give_back(self._sections.cut(borrower, index))
        if borrower.filled == len(borrower.sections):
            del self._joining[borrower.request.request_id]
            borrower.away = borrower.filled
            borrower.request.remote_tokens = borrower.away * self._sections.section_tokens
            self.shared += borrower.away
            self._answered.append(borrower)
        return actions

    def take_answered(self) -> list[DistributedRequest]:
        """Return the borrowers whose join attempt has ended, with or without shared loans."""
        answered, self._answered = self._answered, []
        return answered

    def end(self, request: Request) -> list[Action]:
        borrower = self._joining.get(request.request_id)
        if borrower is None or borrower.request is not request:
            return []  # a later attempt at it may join, while this one's last step ends
        del self._joining[request.request_id]
        return self._sections.give_back(self._sections.cut(borrower, 0))

    def audit(self) -> list[str]:
        """Return all contradictions in the loans of joining requests, one sentence each."""
        tokens = self._sections.section_tokens
        return [
            problem
            for borrower in self._joining.values()
            for problem in (*borrower.audit(tokens), *self._sections.audit(borrower))
        ]

    def _common(self, request: Request, other: DistributedRequest) -> int:
        """Return the number of common sections whose loans are valid and not recalled."""
        of, tokens = other.request, self._sections.section_tokens
        if (of.model, of.cache_root) != (request.model, request.cache_root) or of.spec.images:
            return 0
        first_gone = self._sections.first_lost(other)
        num_valid = other.away if first_gone is None else min(other.away, first_gone)
        mine, its = request.tokens(0, request.num_tokens - 1), of.tokens(0, num_valid * tokens)
        return common_prefix(mine, its) // tokens
