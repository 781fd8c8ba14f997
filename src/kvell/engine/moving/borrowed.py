"""Sections of running requests whose pages lie in the memory of other instances, the creditors.

::

    computed here ──move_kvcache──► ASKED ──granted──► FILLING ──filled──► AWAY, read there
         ▲                            │                   │                  │
         │◄──── refused, no creditor ─┴───────────────────┘                  │ recalled
         └────────────── copied back, or computed anew if there is no room ◄─┘

Sections go in order, from the first of a text on, so what is left here is always its end.  The
last section never goes: a request writes there.  What is away is read in place, since a creditor's
pool continues the numbers of the pool's own pages (:mod:`kvell.mempool.transports.neighbours`).

Pure: the loans themselves are a machine of the memory pool (:mod:`kvell.mempool.loans`).
Source: Infinite-LLM §4, §5.2.1, §6.2 (Listing 1).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.requests.plan import BorrowedPages, NewPages, PageCopy, StepPlan
from kvell.engine.requests.request import Request, RequestState
from kvell.memory import GroupKind, GroupSpec
from kvell.mempool.agent import Agent
from kvell.mempool.loans.actions import (
    LoanFilled,
    LoanGranted,
    LoanNews,
    LoanRecalled,
)
from kvell.mempool.loans.messages import Loan
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action
from kvell.vocabulary import SECTION_TOKENS, RequestId

GRANT_TICKS: Tick = 10_000
"""How long a creditor keeps room for a section that it has granted and not been offered yet."""

NO_ROWS = np.empty((0, 4), np.int32)

_Place = tuple[int, int]
"""Group and position of a page."""


@dataclass
class _Borrower:
    """A request with sections elsewhere, or on their way.

    :ivar creditors: to whom further sections go, in order.
    :ivar loans: of its first sections, in order; the first ``filled`` may be read.
    :ivar away: sections that its tables say are elsewhere.
    :ivar recalled: the first section that must come home; None if none must.
    :ivar returning: pages that are still to be copied home, by their places.
    :ivar ends: loans that are given back with the next result, since copies read them.
    """

    request: Request
    handle: int
    creditors: deque[str] = field(default_factory=deque)
    loans: list[Loan] = field(default_factory=list)
    filled: int = 0
    away: int = 0
    recalled: int | None = None
    returning: dict[_Place, int] = field(default_factory=dict)
    ends: list[Loan] = field(default_factory=list)

    @property
    def has_pages(self) -> bool:
        """Whether the request still holds what the loans belong to; a preempted one does not."""
        return self.request.handle == self.handle


class Borrowed:
    """The borrowing requests of one engine core: what an rManager does for a debtor.

    :param agent: of the instance, over the scheduler's memory core.
    :ivar section_tokens: that go at once.
    """

    def __init__(self, scheduler: Scheduler, agent: Agent) -> None:
        self._core, self._scheduler, self._agent = agent.core, scheduler, agent
        self._loans = agent.loans.borrowing
        self.section_tokens = SECTION_TOKENS
        self._returned = self._lost = 0
        self._borrowers: dict[RequestId, _Borrower] = {}
        self._by_loan: dict[Loan, _Borrower] = {}

    def __len__(self) -> int:
        return len(self._borrowers)

    def has(self, request: Request) -> bool:
        """Whether any of a request's pages are elsewhere, or on their way."""
        return request.request_id in self._borrowers

    def sections_away(self, request: Request) -> int:
        """Return how many of a request's sections are read elsewhere."""
        borrower = self._borrowers.get(request.request_id)
        return 0 if borrower is None else borrower.away

    def tally(self) -> dict[str, int]:
        """Return sections ``borrowed`` now, and so far ``returned`` by a copy, or ``lost``."""
        away = sum(one.away for one in self._borrowers.values())
        return {"borrowed": away, "returned": self._returned, "lost": self._lost}

    def move_kvcache(self, request: Request, num_blocks: int, dst: str) -> str:
        """Let further sections of a request go to a creditor, as far as they are computed in time.

        :param num_blocks: sections of ``SECTION_TOKENS`` tokens.
        :param dst: the creditor, which may refuse each of them.
        :returns: why none goes; "" if they may.
        """
        problem = local_reason(request, self._core.layout.groups)
        if problem or num_blocks < 1:
            return problem or "no section is to go"
        if request.state is not RequestState.RUNNING:
            return "it does not run"
        if dst in self._agent.out_of_reach:
            return f"{dst} cannot be read in place"
        borrower = self._borrowers.get(request.request_id)
        if borrower is None:
            borrower = self._borrowers[request.request_id] = _Borrower(request, request.handle)
        borrower.creditors.clear()  # a plan replaces what is left of the one before
        borrower.creditors.extend([dst] * num_blocks)
        return ""

    def advance(self) -> list[Action]:
        """Ask for room for sections that are computed; to be called between steps."""
        actions: list[Action] = []
        for borrower in list(self._borrowers.values()):
            if not borrower.has_pages:
                actions += self._forget(borrower)
                continue
            actions += self._given_back(borrower)
            while borrower.creditors and self._next_is_computed(borrower):
                actions += self._ask(borrower, borrower.creditors.popleft())
            if not (borrower.creditors or borrower.loans or borrower.returning or borrower.ends):
                del self._borrowers[borrower.request.request_id]
        return actions

    def take_in(self, news: LoanNews) -> list[Action]:
        """Act on what happened to a loan; to be called between steps."""
        borrower = self._by_loan.get(news.loan)
        if borrower is None:
            return []
        if not borrower.has_pages:
            return self._forget(borrower)
        index = borrower.loans.index(news.loan)
        if isinstance(news, LoanGranted) and self._is_in_place(news.loan):
            return self._loans.fill(news.loan, self._pages(borrower, index))
        if isinstance(news, LoanFilled):
            return self._filled(borrower)
        if isinstance(news, LoanRecalled) and index < borrower.away:
            before = borrower.recalled
            borrower.recalled = index if before is None else min(index, before)
            return self._drop_from(borrower, borrower.away)  # no copy reads these
        if index < borrower.away:
            return self._lose(borrower)
        # Nobody reads it yet.  Later sections stay here too, so that the rest is one run.
        borrower.creditors.clear()
        return self._drop_from(borrower, index)

    def before_plan(self) -> NewPages:
        """Let filled sections go, and recalled ones come home, before a step is planned.

        :returns: tables' rows [m, 4] of what is read elsewhere from now on.
        """
        if not self._borrowers:
            return NO_ROWS
        rows: list[tuple[int, int, int, int]] = []
        for borrower in self._borrowers.values():
            if not borrower.has_pages or len(self._core.sources(borrower.handle)):
                continue  # a step must make its copies first
            if borrower.recalled is not None and borrower.recalled < borrower.away:
                self._come_home(borrower, borrower.recalled)
            elif borrower.filled > borrower.away and borrower.recalled is None:
                for index in range(borrower.away, borrower.filled):
                    pages = self._foreign(borrower, index)
                    rows += [(borrower.handle, *place, page) for place, page in pages.items()]
                borrower.away = borrower.filled
                self._core.send_away(borrower.handle, borrower.away * self.section_tokens)
        return np.array(rows, np.int32).reshape(-1, 4)

    def planned(self, plan: StepPlan, rows: NewPages) -> StepPlan:
        """Return the plan with what it reads elsewhere, and what it copies home.

        :param rows: of :meth:`before_plan`.
        """
        if not self._borrowers:
            return plan
        copies: list[PageCopy] = []
        borrowed: list[BorrowedPages] = []
        handles = {work.handle for work in plan.work}
        for borrower in self._borrowers.values():
            if borrower.handle not in handles:
                continue
            borrowed += self._rights(borrower)
            copies += _copies_home(borrower, plan.new_pages)
        return replace(
            plan,
            new_pages=np.concatenate([plan.new_pages, rows]) if len(rows) else plan.new_pages,
            copies=(*plan.copies, *copies),
            borrowed=tuple(borrowed),
        )

    def missed(self, handles: Sequence[int]) -> list[Action]:
        """Act on rows that do not count: their requests compute all of it anew."""
        late = [one for one in self._borrowers.values() if one.handle in handles]
        for borrower in late:
            borrower.request.is_spoiled = True  # a state was advanced from what was read
        return [action for borrower in late for action in self._lose(borrower)]

    def ended(self, request: Request) -> list[Action]:
        """A request ends here, however: creditors get their memory back."""
        borrower = self._borrowers.get(request.request_id)
        return [] if borrower is None else self._forget(borrower)

    def audit(self) -> list[str]:
        """Every contradiction in what is away, a sentence for each."""
        found: list[str] = []
        for borrower in self._borrowers.values():
            name = borrower.request.request_id
            if not borrower.away <= borrower.filled <= len(borrower.loans):
                found.append(f"{name}: {borrower.away} sections away of {borrower.filled} filled")
            if borrower.away * self.section_tokens >= max(1, borrower.request.num_tokens):
                found.append(f"{name}: its last section is away")
            found += [
                f"{name}: {loan} is not its"
                for loan in borrower.loans
                if self._by_loan.get(loan) is not borrower
            ]
        return found

    # ------------------------------------------------------------------ one request

    def _next_is_computed(self, borrower: _Borrower) -> bool:
        """Whether the next section can go: it is complete, and not the last one."""
        end = (len(borrower.loans) + 1) * self.section_tokens
        return borrower.recalled is None and end <= borrower.request.settled

    def _ask(self, borrower: _Borrower, creditor: str) -> list[Action]:
        request = borrower.request
        counts = self._counts(request)
        loan, actions = self._loans.borrow(
            creditor, counts, self._agent.now, GRANT_TICKS, model=request.model
        )
        borrower.loans.append(loan)
        self._by_loan[loan] = borrower
        return actions

    def _is_in_place(self, loan: Loan) -> bool:
        """Whether attention can read a creditor's pool where it lies."""
        return self._loans.creditor_of(loan) in self._agent.neighbours

    def _filled(self, borrower: _Borrower) -> list[Action]:
        standing = self._loans.standing()
        while borrower.filled < len(borrower.loans):
            if borrower.loans[borrower.filled] not in standing:
                break
            borrower.filled += 1
        return []

    def _come_home(self, borrower: _Borrower, first: int) -> None:
        """Ask for pages here for sections from ``first`` on; they are copied once they are had."""
        self._returned += borrower.away - first
        for index in range(first, borrower.away):
            borrower.returning.update(self._foreign(borrower, index))
        borrower.ends += self._cut(borrower, first)
        borrower.away = first
        borrower.recalled = None
        borrower.creditors.clear()
        self._core.send_away(borrower.handle, first * self.section_tokens)

    def _given_back(self, borrower: _Borrower) -> list[Action]:
        """Give back what was copied home, once the step that copied it is over."""
        if borrower.returning:
            return []
        ends, borrower.ends = borrower.ends, []
        return self._give_back(ends)

    def _lose(self, borrower: _Borrower) -> list[Action]:
        """Pages that a request needs are gone: it computes all of its tokens anew."""
        request = borrower.request
        self._lost += borrower.away
        actions = self._forget(borrower)
        is_running = request.state is RequestState.RUNNING and request.finish_reason is None
        if is_running and borrower.has_pages:
            self._scheduler.start_again(request)
        return actions

    def _forget(self, borrower: _Borrower) -> list[Action]:
        del self._borrowers[borrower.request.request_id]
        return self._give_back([*self._cut(borrower, 0), *borrower.ends])

    def _drop_from(self, borrower: _Borrower, index: int) -> list[Action]:
        """Give back loans that are not read yet."""
        return self._give_back(self._cut(borrower, index))

    def _cut(self, borrower: _Borrower, index: int) -> list[Loan]:
        """Take the loans from ``index`` on off a request."""
        cut = borrower.loans[index:]
        del borrower.loans[index:]
        borrower.filled = min(borrower.filled, index)
        for loan in cut:
            del self._by_loan[loan]
        return cut

    def _give_back(self, loans: Sequence[Loan]) -> list[Action]:
        return [action for loan in loans for action in self._loans.give_back(loan)]

    # ------------------------------------------------------------------ pages

    def _groups(self, request: Request) -> Iterator[tuple[int, GroupSpec]]:
        return full_groups(request.model, self._core.layout.groups)

    def _counts(self, request: Request) -> list[int]:
        """Pages of each group in a section."""
        counts = [0] * len(self._core.layout.groups)
        for index, group in self._groups(request):
            counts[index] = self.section_tokens // group.page_tokens
        return counts

    def _places(self, request: Request, section: int) -> Iterator[_Place]:
        """Places of a section's pages, in the order in which a loan has them."""
        for index, group in self._groups(request):
            count = self.section_tokens // group.page_tokens
            for position in range(section * count, (section + 1) * count):
                yield index, position

    def _pages(self, borrower: _Borrower, section: int) -> list[int]:
        """The own pages of a section, in the order in which a loan has them."""
        held = self._core.held_pages(borrower.handle)[:, 1:].tolist()
        page_of = {(group, position): page for group, position, page in held}
        return [page_of[place] for place in self._places(borrower.request, section)]

    def _foreign(self, borrower: _Borrower, section: int) -> dict[_Place, int]:
        """A creditor's pages of a section, numbered as pages behind the own pool."""
        standing = self._loans.standing()[borrower.loans[section]]
        first = self._agent.neighbours[standing.creditor, standing.incarnation]
        groups = self._core.layout.groups
        places = self._places(borrower.request, section)
        return {
            place: first * groups[place[0]].pages_per_large + page
            for place, page in zip(places, chain(*standing.pages), strict=True)
        }

    def _rights(self, borrower: _Borrower) -> list[BorrowedPages]:
        standing = self._loans.standing()
        loans = [*borrower.loans[: borrower.away], *borrower.ends]
        found = [standing.get(loan) for loan in loans]
        # A right that is gone already is told as one that cannot stand: the row is missed.
        return [
            BorrowedPages(borrower.handle, "", 0, 0)
            if one is None
            else BorrowedPages(borrower.handle, one.creditor, one.incarnation, one.right)
            for one in found
        ]


def full_groups(model: str, groups: Sequence[GroupSpec]) -> Iterator[tuple[int, GroupSpec]]:
    """Yield the groups of a model whose sections may lie elsewhere, with their indices."""
    for index, group in enumerate(groups):
        if group.model == model and group.kind is GroupKind.FULL:
            yield index, group


def local_reason(request: Request, groups: Sequence[GroupSpec]) -> str:
    """Why all of a request's pages stay here; "" if sections may lie elsewhere."""
    own = [group for group in groups if group.model == request.model]
    full = [group for _, group in full_groups(request.model, groups)]
    if not full:
        return "its model has no full attention"
    if any(group.kind is GroupKind.DROPPING for group in own):
        return "its model drops tokens"
    if any(group.counts_images for group in own):
        return "images lie among the text in its pages"
    if any(SECTION_TOKENS % group.page_tokens for group in full):
        return f"its pages do not divide {SECTION_TOKENS} tokens"
    return ""


def _copies_home(borrower: _Borrower, rows: NewPages) -> list[PageCopy]:
    """Return the copies for pages that a request was given for what comes home.

    They are made last.  A page that was moved again in the same plan is the later one.
    """
    if not borrower.returning:
        return []
    own = rows[rows[:, 0] == borrower.handle]
    given = {(group, position): page for _, group, position, page in own.tolist()}
    found = [place for place in borrower.returning if place in given]
    return [PageCopy(place[0], borrower.returning.pop(place), given[place]) for place in found]
