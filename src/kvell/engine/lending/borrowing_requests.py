"""Sections of running requests whose pages are stored at other instances, the creditors.

::

    computed here ──move_kvcache──► ASKED ──granted──► FILLING ──filled──► AWAY, read there
         ▲                            │                   │                  │
         │◄──── refused, no creditor ─┴───────────────────┘                  │ recalled
         └────────── copied back, or recomputed from there on if lost ◄──────┘

Sections leave in order, from the first of a text on, so the local sections are always its end.  The
last section never leaves, since the request writes there.  On one host, steps read remote sections
in place: a creditor's pool continues the page numbers of the own pool
(:mod:`kvell.mempool.transports.neighbours`).  Across hosts, the creditor computes attention over
them (:mod:`kvell.models.partials`), and recalled sections are recomputed, not copied.

A request that is longer than the local memory has a placement.  Its recalled sections without room
here move to another creditor, which pulls them from the creditor that recalls them.

A request that is preempted, or loses a section, keeps its earlier sections where they are, and
continues after them once it is admitted again.

Pure: the loans themselves are a state machine of the memory pool (:mod:`kvell.mempool.loans`).
Source: Infinite-LLM §4, §5.2.1, §6.2 (Listing 1).

The running requests of an instance with the most sections that could move to creditors.

The rManager reports them in its heartbeat (Infinite-LLM §6.2).

Requests that share the remote sections of another request with the same text.

::

    submitted ──the loans are shared──► JOINING ──all are answered──► queued, continues after them
        │                                  └── none is valid any more ┐
        └── no request borrows more of its text than is cached here ──┴► queued

So a request hits a prefix that is in no cache, and needs neither memory nor time for it: it attends
to the creditors' pages.  Each request has its own rights, so the requests may end in any order, and
each handles recalls alone.  Pure.

Source: DESIGN.md §15.9; loans of :mod:`kvell.mempool.loans` with ``Borrow.shares``.

Recalled sections: they are copied back, or move to another creditor.

Pure.  Source: Infinite-LLM §5.2.1, §6.2 (Listing 1).
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import replace

import numpy as np

from kvell.engine.lending.distributed_request import (
    DistributedRequest,
    local_reason,
    repeats,
    resumes,
)
from kvell.engine.lending.placement import Placement, Placements
from kvell.engine.lending.section_loans import SectionLoans
from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.protocol.messages import NotTaken
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.statistics import MOST_LONGEST
from kvell.engine.requests.plan import BorrowedPages, NewPages, PageCopy, StepPlan
from kvell.engine.requests.request import Request, RequestState
from kvell.memory import Layout, common_prefix
from kvell.mempool.agent import Agent
from kvell.mempool.loans.actions import (
    LoanFilled,
    LoanGranted,
    LoanNews,
    LoanRecalled,
    LoanRefused,
)
from kvell.mempool.loans.creditor_ledger import BORROWS
from kvell.mempool.loans.messages import Loan
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action
from kvell.vocabulary import RequestId, StepNumber


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

    @property
    def open(self) -> Sized:
        """The joining requests; always the same container."""
        return self._joining

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


NO_ROWS = np.empty((0, 4), np.int32)


class BorrowingRequests:
    """The borrowing requests of one engine core: the debtor's part of an rManager.

    :param agent: the instance's agent, over the scheduler's memory core.
    :param model_lens: by model, the most tokens of a request that borrows nothing.
    """

    def __init__(self, scheduler: Scheduler, agent: Agent, model_lens: Mapping[str, int]) -> None:
        self._core, self._scheduler, self._agent = agent.core, scheduler, agent
        self.sections = SectionLoans(agent, scheduler.limits.section_tokens)
        self._returned = self._lost = 0
        self._borrowers: dict[RequestId, DistributedRequest] = {}
        self._placements = Placements()
        self._model_lens = model_lens
        self._recalls = Recalls(agent, self.sections, self._placements)
        self._joins = JoiningRequests(self.sections, scheduler.cached_prompt_tokens)
        self._done = StepNumber(0)

    @property
    def section_tokens(self) -> int:
        """Tokens in a section."""
        return self.sections.section_tokens

    def __len__(self) -> int:
        return len(self._borrowers) + len(self._placements) + len(self._joins)

    @property
    def open(self) -> tuple[Sized, ...]:
        """The requests that borrow, have a placement or join; always the same containers."""
        return self._borrowers, self._placements, self._joins.open

    def has(self, request: Request) -> bool:
        """Return whether any pages of a request are remote, on their way, or will be."""
        name = request.request_id
        return name in self._borrowers or name in self._placements or request in self._joins

    @property
    def next_deadline(self) -> Tick | None:
        """The time at which :meth:`advance` has something to do; None if there is none."""
        return self._placements.next_deadline

    def sections_asked(self, request: Request) -> int | None:
        """Return the number of remote sections, also on their way; None for a placed request."""
        borrower = self._borrowers.get(request.request_id)
        count = 0 if borrower is None else len(borrower.sections)
        return None if request.request_id in self._placements else count

    def tally(self) -> dict[str, int]:
        """Return the number of sections ``borrowed`` now, and the other counts so far."""
        return {
            "borrowed": sum(borrower.away for borrower in self._borrowers.values()),
            "returned": self._returned,
            "replaced": self._recalls.replaced,
            "shared": self._joins.shared,
            "lost": self._lost,
        }

    def placements(self) -> tuple[RequestPlacementEntry, ...]:
        """Return where the sections of all borrowing requests are."""
        return tuple(e for debtor in self._borrowers.values() for e in self.sections.placed(debtor))

    def place(self, request: Request, entries: Sequence[RequestPlacementEntry]) -> None:
        """Record the placement of a new request that is longer than the free local memory."""
        if entries and not local_reason(request.model, self._core.layout.groups):
            most_tokens = len(request.prompt) + request.max_tokens
            fits_here = most_tokens <= self._model_lens[request.model]
            self._placements.add(request, entries, self.section_tokens, fits_here=fits_here)

    def join(self, request: Request) -> list[Action]:
        """Let a new request share another request's remote sections of the same text.

        :returns: empty if there are none; else the request waits for :meth:`take_joined`.
        """
        if not resumes(request.model, self._core.layout.groups):
            return []
        return self._joins.begin(request, self._borrowers.values())

    def take_joined(self) -> list[Request]:
        joined = self._joins.take_answered()
        self._borrowers |= {debtor.request.request_id: debtor for debtor in joined if debtor.away}
        return [debtor.request for debtor in joined]

    def take_given_up(self) -> list[tuple[Request, NotTaken]]:
        return self._placements.take_given_up()

    def move_kvcache(self, request: Request, num_blocks: int, dst: str) -> str:
        """Plan to move further sections of a request to a creditor, once they are computed.

        :param num_blocks: sections of ``SECTION_TOKENS`` tokens.
        :param dst: the creditor, which may refuse each of them.
        :returns: why no section can move; "" if they can.
        """
        problem = local_reason(request.model, self._core.layout.groups) or request.local_reason
        if problem or num_blocks < 1:
            return problem or "no section is to be lent"
        if request.state is not RequestState.RUNNING:
            return "it is not running"
        if dst in self._agent.out_of_reach:
            return f"{dst} cannot be read in place"
        placement = self._placements.get(request.request_id)
        if placement is not None:
            placement.widen(dst)
            return ""
        borrower = self._borrower(request)
        borrower.creditors = deque([dst] * num_blocks)  # in place of the rest of an earlier plan
        return ""

    def advance(self, done: StepNumber | None = None) -> list[Action]:
        """Request loans for sections that are computed; call it between steps.

        :param done: the latest step that has ended; None: the same as in the last call.
        """
        if done is not None:
            self._done = done
            self.sections.end_step()
        actions: list[Action] = []
        asking = {name for name, debtor in self._borrowers.items() if debtor.is_asking}
        self._placements.advance(self._agent.now, asking, self.sections)
        for placement in self._placements.values():
            if placement.request.state is RequestState.RUNNING:
                self._borrower(placement.request)
        for borrower in list(self._borrowers.values()):
            if not borrower.has_pages:
                actions += self._keep(borrower)
                continue
            actions += self.sections.give_back(borrower.take_ends(self._done))
            actions += self._recalls.ask_others(borrower)
            actions += self._ask_on(borrower)
            is_over = not (borrower.creditors or borrower.returning or borrower.ends)
            if is_over and not borrower.sections:
                del self._borrowers[borrower.request.request_id]
        return actions

    def take_in(self, news: LoanNews) -> list[Action]:
        """Process an event of a loan; call it between steps."""
        borrower = self.sections.borrower(news.loan)
        if borrower is None:
            return []
        if borrower.request in self._joins:
            return self._joins.take_in(borrower, news)
        index = borrower.index_of(news.loan)
        if index is None:
            return self._recalls.take_in(borrower, news) if borrower.has_pages else []
        if not borrower.has_pages:
            return self._keep(borrower, index)
        placement = self._placements.get(borrower.request.request_id)
        if isinstance(news, LoanGranted) and self.sections.is_readable(news.loan):
            if placement is not None:
                placement.grants()
            return self.sections.let_pull(borrower, index)
        if isinstance(news, LoanFilled):
            self.sections.note_filled(borrower)
            return []
        if index < borrower.away:
            if isinstance(news, LoanRecalled) and self._recalls.moves(borrower, index):
                return self._recalls.on_recall(borrower, index)
            return self._lose(borrower, index)
        # No step reads it yet.  Later sections stay here too, so that the local rest is one run.
        borrower.creditors.clear()
        if placement is not None:
            borrows = isinstance(news, LoanRefused) and news.why == BORROWS
            placement.refuses(borrower.sections[index].creditor, borrows=borrows)
        cut = self.sections.cut(borrower, index)
        return self.sections.give_back(cut) + self._ask_on(borrower)

    def before_plan(self, step: StepNumber) -> NewPages:
        """Make filled sections remote and recalled ones local, before a step is planned.

        :returns: table rows [m, 4] of the creditors' pages that are read from now on.
        """
        self.sections.begin_step()
        if not self._borrowers:
            return NO_ROWS
        rows: list[tuple[int, int, int, int]] = []
        for borrower in self._borrowers.values():
            if not borrower.has_pages:
                continue
            sources = self._core.sources(borrower.handle)
            if sources[:, 3].any():
                continue  # a step must copy its prefix first
            if borrower.recalled is not None and borrower.recalled < borrower.away:
                if not len(sources):
                    self._come_home(borrower, borrower.recalled, step)
                continue
            sections, over = self._recalls.replace(borrower)
            if over:
                borrower.end_with(step, over)
            if borrower.filled > borrower.away and borrower.recalled is None:
                sections += range(borrower.away, borrower.filled)
                self._send_away(borrower, borrower.filled)
            rows += self.sections.rows(borrower, sections)
        return np.array(rows, np.int32).reshape(-1, 4)

    def on_planned(self, plan: StepPlan, rows: NewPages) -> tuple[StepPlan, list[Action]]:
        """Return the plan with its remote reads and copies back, and the actions that precede it.

        :param rows: the result of :meth:`before_plan`.
        """
        if not self._borrowers:
            return plan, []
        actions: list[Action] = []
        copies: list[PageCopy] = []
        borrowed: list[BorrowedPages] = []
        away: list[tuple[int, int]] = []
        handles = {work.handle for work in plan.work}
        pages = [plan.new_pages, rows] if len(rows) else [plan.new_pages]
        for borrower in list(self._borrowers.values()):
            was_in = borrower.has_pages
            actions += [] if was_in else self._keep(borrower)
            if not was_in and borrower.has_pages:  # this plan admits it
                again = self.sections.rows(borrower, range(borrower.away))
                pages.append(np.array(again, np.int32).reshape(-1, 4))
            actions += self.sections.cut_moved(borrower, plan.new_pages)
            if borrower.handle not in handles:
                continue
            borrowed += self.sections.rights(borrower)
            away += self.sections.asked_for(borrower)
            if borrower.returning:
                copies += borrower.copies_home(plan.new_pages)
                borrower.ends_with = plan.step
        plan = replace(
            plan,
            new_pages=np.concatenate(pages) if len(pages) > 1 else plan.new_pages,
            copies=(*plan.copies, *copies),
            borrowed=tuple(borrowed),
            away=tuple(away),
        )
        return plan, actions

    def on_missed(self, handles: Sequence[int]) -> list[Action]:
        """Handle rows that do not count: their requests recompute what they lost."""
        actions: list[Action] = []
        late = [debtor for debtor in self._borrowers.values() if debtor.handle in handles]
        for borrower in [debtor for debtor in late if debtor.has_pages]:
            lost = self.sections.first_lost(borrower)
            can_repeat = repeats(borrower.request.model, self._core.layout.groups)
            if lost is None and can_repeat and borrower.asks_again():
                continue
            borrower.request.is_spoiled = True  # a state was advanced with what was read
            actions += self._lose(borrower, lost or 0)
        return actions

    def on_ended(self, request: Request) -> list[Action]:
        self._placements.pop(request.request_id, None)
        borrower = self._borrowers.get(request.request_id)
        return self._joins.end(request) if borrower is None else self._forget(borrower)

    def audit(self) -> list[str]:
        """Return all contradictions in remote sections, one sentence each."""
        problems = self._joins.audit()
        for borrower in self._borrowers.values():
            problems += [*borrower.audit(self.section_tokens), *self.sections.audit(borrower)]
        return problems

    # ------------------------------------------------------------------ one request

    def _borrower(self, request: Request) -> DistributedRequest:
        """Return the borrower of a running request; create it if there is none."""
        new = DistributedRequest(request, request.handle)
        return self._borrowers.setdefault(request.request_id, new)

    def _ask_on(self, borrower: DistributedRequest) -> list[Action]:
        """Request loans for the next sections that are computed."""
        actions: list[Action] = []
        while borrower.next_is_computed(self.section_tokens):
            creditor = self._next_creditor(borrower)
            if not creditor:
                break
            section, loan_actions = self.sections.ask(borrower, creditor)
            borrower.sections.append(section)
            actions += loan_actions
        self._placements.end_blocked(borrower)
        return actions

    def _next_creditor(self, borrower: DistributedRequest) -> str:
        """Return the creditor for the next section; "" if there is none."""
        placement = self._placements.get(borrower.request.request_id)
        if placement is None:
            return borrower.creditors.popleft() if borrower.creditors else ""
        return placement.creditor(len(borrower.sections), self._agent.now)

    def _send_away(self, borrower: DistributedRequest, sections: int) -> None:
        """Make exactly the first ``sections`` sections remote."""
        borrower.away = sections
        borrower.request.remote_tokens = sections * self.section_tokens
        self._core.send_away(borrower.handle, borrower.request.remote_tokens)

    def _come_home(self, borrower: DistributedRequest, first: int, step: StepNumber) -> None:
        """Make sections from ``first`` on local; they are copied once they have pages."""
        self._returned += borrower.away - first
        for index in range(first, borrower.away):
            borrower.returning.update(self.sections.beyond(borrower, index))
        borrower.end_with(step, self.sections.cut(borrower, first))
        borrower.recalled = None
        borrower.creditors.clear()
        self._send_away(borrower, first)

    def _lose(self, borrower: DistributedRequest, index: int) -> list[Action]:
        """Handle the loss of a section: the request recomputes it and all later ones."""
        request = borrower.request
        self._lost += borrower.away - index
        if request.state is not RequestState.RUNNING or request.finish_reason is not None:
            return self._forget(borrower)
        if borrower.has_pages:
            self._scheduler.start_again(request)
        return self._keep(borrower, index)

    def _keep(self, borrower: DistributedRequest, limit: int | None = None) -> list[Action]:
        """Keep the first remote sections of a request that has given its pages back.

        The request may run again by now; if it cannot continue after these sections, all loans end.

        :param limit: largest number of sections to keep; None: all that are remote.
        """
        request = borrower.request
        limit = borrower.away if limit is None else min(limit, borrower.away)
        sections = min([limit, *borrower.moving])
        if not resumes(request.model, self._core.layout.groups) or request.finish_reason:
            sections = 0
        is_in = request.state is RequestState.RUNNING
        if is_in and request.remote_tokens != sections * self.section_tokens:
            sections = 0  # the request holds these sections here
        if not sections:
            return self._forget(borrower)
        loans = self.sections.cut(borrower, sections) + borrower.ends
        borrower.starts_again(sections)
        request.remote_tokens = sections * self.section_tokens
        borrower.handle = request.handle if is_in else borrower.handle
        return self.sections.give_back(loans)

    def _forget(self, borrower: DistributedRequest) -> list[Action]:
        borrower.request.remote_tokens = 0
        del self._borrowers[borrower.request.request_id]
        return self.sections.give_back([*self.sections.cut(borrower, 0), *borrower.ends])


def longest(
    borrowed: BorrowingRequests, running: Sequence[Request], layout: Layout
) -> tuple[RequestPlacementEntry, ...]:
    """Return at most ``MOST_LONGEST`` requests, the one with most such sections first.

    Requests with a placement are left out: it says where their sections are.
    """
    lendable = {
        model: not local_reason(model, layout.groups)
        for model in {request.model for request in running}
    }
    counts = (
        (-_sections(borrowed, request), request.request_id)
        for request in running
        if lendable[request.model] and request.finish_reason is None
    )
    entries = heapq.nsmallest(MOST_LONGEST, (entry for entry in counts if entry[0] < 0))
    at = borrowed.sections.instance
    return tuple(RequestPlacementEntry(name, at, -count, local=True) for count, name in entries)


def _sections(borrowed: BorrowingRequests, request: Request) -> int:
    """Return the number of whole local sections that may leave; the last one stays."""
    num_asked = borrowed.sections_asked(request)
    if num_asked is None:
        return 0
    settled = min(request.settled, request.num_tokens - 1)
    return settled // borrowed.section_tokens - num_asked
