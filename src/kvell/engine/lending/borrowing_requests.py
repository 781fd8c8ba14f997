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
Source: Infinite-LLM §4, §5.2.1, §6.2 (Listing 1); DESIGN.md §15.9.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import chain

import numpy as np

from kvell.engine.lending.distributed_request import (
    DistributedRequest,
    Place,
    RemoteSection,
    Sections,
    loans_of,
    local_reason,
    repeats,
    resumes,
)
from kvell.engine.lending.placement import Placements
from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.statistics import MOST_LONGEST
from kvell.engine.requests.plan import BorrowedPages, NewPages, PageCopy, StepPlan
from kvell.engine.requests.request import Request, RequestState
from kvell.memory import common_prefix
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
from kvell.pages.rows import NewPageRow, SourceRow
from kvell.vocabulary import PageId, RequestId, StepNumber

GRANT_TICKS: Tick = 30_000
"""Longest time from a creditor's grant until a section is offered to it."""
JOIN_TICKS: Tick = 2_000
"""Longest time that a request waits for its creditors."""
NEVER_HELD = -1
"""Handle of a borrower that has had no pages here so far."""
NO_ROWS = np.empty((0, 4), np.int32)


class BorrowingRequests:
    """The borrowing requests of one engine core: the debtor's part of an rManager.

    A new request may share the remote sections of another one with the same text::

        submitted ──the loans are shared──► JOINING ──all are answered──► queued, resumes after them
            │                                  └── none is valid any more ┐
            └── no request borrows more of its text than is cached here ──┴► queued

    So a request hits a prefix that is in no cache, and needs neither memory nor time for it: it
    attends to the creditors' pages.  Each request has its own rights, so the requests may end in
    any order, and each handles recalls alone.

    :param agent: the instance's agent, over the scheduler's memory core.
    :param model_lens: by model, the most tokens of a request that borrows nothing.
    :ivar placed: the placements of requests that are longer than the local memory.
    :ivar step_ticks: duration of the longest recent step.
    """

    def __init__(self, scheduler: Scheduler, agent: Agent, model_lens: Mapping[str, int]) -> None:
        self._core, self._scheduler, self._agent = agent.core, scheduler, agent
        self._loans = agent.borrowing
        self.section_tokens = scheduler.limits.section_tokens
        self.borrowers: dict[RequestId, DistributedRequest] = {}
        self.joining: dict[RequestId, DistributedRequest] = {}
        self._joined: list[Request] = []
        self.placed = Placements()
        self._model_lens = model_lens
        self._counts = dict.fromkeys(("returned", "replaced", "shared", "lost"), 0)
        self._done = StepNumber(0)
        self.step_ticks = 0
        self._begun_at: Tick = agent.now

    def __len__(self) -> int:
        return len(self.borrowers) + len(self.placed) + len(self.joining)

    @property
    def open(self) -> tuple[Sized, ...]:
        """The requests that borrow, have a placement or join; always the same containers."""
        return self.borrowers, self.placed, self.joining

    def has(self, request: Request) -> bool:
        """Return whether any pages of a request are remote, on their way, or will be."""
        name = request.request_id
        return name in self.borrowers or name in self.placed or name in self.joining

    def tally(self) -> dict[str, int]:
        borrowed = sum(borrower.away for borrower in self.borrowers.values())
        return {"borrowed": borrowed, **self._counts}

    def placements(self) -> tuple[RequestPlacementEntry, ...]:
        """Return where the sections of borrowing requests are; those on their way are remote."""
        return tuple(
            entry for borrower in self.borrowers.values() for entry in self._entries(borrower)
        )

    def _entries(self, borrower: DistributedRequest) -> list[RequestPlacementEntry]:
        request = borrower.request
        counts = Counter(section.creditor for section in borrower.sections)
        here = -(-request.num_tokens // self.section_tokens) - borrower.away
        name, debtor = request.request_id, self._agent.instance
        away = [RequestPlacementEntry(name, *item, local=False) for item in counts.items()]
        return [RequestPlacementEntry(name, debtor, here, local=True), *away]

    def longest(self, running: Sequence[Request]) -> tuple[RequestPlacementEntry, ...]:
        """Return at most ``MOST_LONGEST`` requests, those with most sections that may leave first.

        Requests with a placement are left out: it says where their sections are.  An rManager
        reports the others in its heartbeat (Infinite-LLM §6.2).
        """
        lendable = {
            model: not local_reason(model, self._core.layout.groups)
            for model in {request.model for request in running}
        }
        counts = (
            (-self._num_lendable(request), request.request_id)
            for request in running
            if lendable[request.model] and request.finish_reason is None
        )
        entries = heapq.nsmallest(MOST_LONGEST, (entry for entry in counts if entry[0] < 0))
        at = self._agent.instance
        return tuple(RequestPlacementEntry(name, at, -count, local=True) for count, name in entries)

    def _num_lendable(self, request: Request) -> int:
        """Return the number of whole local sections that may leave; the last one stays."""
        if request.request_id in self.placed:
            return 0
        borrower = self.borrowers.get(request.request_id)
        num_asked = 0 if borrower is None else len(borrower.sections)
        return min(request.settled, request.num_tokens - 1) // self.section_tokens - num_asked

    def place(self, request: Request, entries: Sequence[RequestPlacementEntry]) -> None:
        """Record the placement of a new request that is longer than the free local memory."""
        if entries and not local_reason(request.model, self._core.layout.groups):
            most_tokens = len(request.prompt) + request.max_tokens
            fits_here = most_tokens <= self._model_lens[request.model]
            self.placed.add(request, entries, self.section_tokens, fits_here=fits_here)

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
        placement = self.placed.get(request.request_id)
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
            took_ticks = self._agent.now - self._begun_at
            self.step_ticks = max(took_ticks, self.step_ticks * 7 // 8)
        actions: list[Action] = []
        asking = {name for name, debtor in self.borrowers.items() if debtor.is_asking}
        self.placed.advance(self._agent.now, asking, self._agent.instance, self.step_ticks)
        for placement in self.placed.values():
            if placement.request.state is RequestState.RUNNING:
                self._borrower(placement.request)
        for borrower in list(self.borrowers.values()):
            if not borrower.has_pages:
                actions += self._keep(borrower)
                continue
            actions += self._give_back(borrower.take_ends(self._done))
            actions += self._ask_others(borrower)
            actions += self._ask_on(borrower)
            is_over = not (borrower.creditors or borrower.returning or borrower.ends)
            if is_over and not borrower.sections:
                del self.borrowers[borrower.request.request_id]
        return actions

    def take_in(self, news: LoanNews) -> list[Action]:
        """Process an event of a loan; call it between steps."""
        borrowers = (*self.borrowers.values(), *self.joining.values())
        holding = (each for each in borrowers if news.loan in loans_of(each.sections))
        borrower = next(holding, None)
        if borrower is None:
            return []  # the loan has ended
        index = borrower.index_of(news.loan)
        if self.joining.get(borrower.request.request_id) is borrower:
            return self._take_in_joining(borrower, news)
        if index is None:
            return self._take_in_successor(borrower, news) if borrower.has_pages else []
        if not borrower.has_pages:
            return self._keep(borrower, index)
        placement = self.placed.get(borrower.request.request_id)
        if isinstance(news, LoanGranted) and self._is_readable(borrower, news.loan):
            if placement is not None:
                placement.grants()
            held = self._core.held_pages(borrower.handle)
            pages = self._sections(borrower).own(held, index)
            return self._loans.fill(news.loan, pages, step_ticks=self.step_ticks)
        if isinstance(news, LoanFilled):
            borrower.note_filled(self._loans.readable)
            return []
        if index < borrower.away:
            is_recall = isinstance(news, LoanRecalled)
            # A recalled section can move; it is not copied back across hosts.
            if is_recall and (not borrower.by_queries or self._goes_on(borrower, index)):
                return self._on_recall(borrower, index)
            return self._lose(borrower, index)
        # No step reads it yet.  Later sections stay here too, so that the local rest is one run.
        borrower.creditors.clear()
        if placement is not None:
            borrows = isinstance(news, LoanRefused) and news.why == BORROWS
            placement.refuses(borrower.sections[index].creditor, borrows=borrows)
        return self._give_back(borrower.cut(index)) + self._ask_on(borrower)

    def before_plan(self, step: StepNumber) -> NewPages:
        """Make filled sections remote and recalled ones local, before a step is planned.

        :returns: rows [m, :class:`.NewPageRow`] of the creditors' pages that are read from now on.
        """
        self._begun_at = self._agent.now
        if not self.borrowers:
            return NO_ROWS
        rows: list[tuple[int, int, int, int]] = []
        for borrower in self.borrowers.values():
            if not borrower.has_pages:
                continue
            sources = self._core.sources(borrower.handle)
            if sources[:, SourceRow.END].any():
                continue  # a step must copy its prefix first
            if borrower.recalled is not None and borrower.recalled < borrower.away:
                if not len(sources):
                    self._come_home(borrower, borrower.recalled, step)
                continue
            sections, over = borrower.replace_moved()
            self._counts["replaced"] += len(sections)
            if over:
                borrower.end_with(step, over)
            if borrower.filled > borrower.away and borrower.recalled is None:
                sections += range(borrower.away, borrower.filled)
                self._send_away(borrower, borrower.filled)
            rows += self._rows(borrower, sections)
        return np.array(rows, np.int32).reshape(-1, 4)

    def on_planned(self, plan: StepPlan, rows: NewPages) -> tuple[StepPlan, list[Action]]:
        """Return the plan with its remote reads and copies back, and the actions before it."""
        if not self.borrowers:
            return plan, []
        actions: list[Action] = []
        copies: list[PageCopy] = []
        borrowed: list[BorrowedPages] = []
        away: list[tuple[int, int]] = []
        handles = {work.handle for work in plan.work}
        pages = [plan.new_pages, rows] if len(rows) else [plan.new_pages]
        for borrower in list(self.borrowers.values()):
            was_in = borrower.has_pages
            actions += [] if was_in else self._keep(borrower)
            if not was_in and borrower.has_pages:  # this plan admits it
                again = self._rows(borrower, range(borrower.away))
                pages.append(np.array(again, np.int32).reshape(-1, 4))
            actions += self._cut_moved(borrower, plan.new_pages)
            if borrower.handle not in handles:
                continue
            borrowed += self._rights(borrower)
            if borrower.by_queries and borrower.away:  # its first tokens are in no page of tables
                away.append((borrower.handle, borrower.away * self.section_tokens))
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
        late = [debtor for debtor in self.borrowers.values() if debtor.handle in handles]
        for borrower in [debtor for debtor in late if debtor.has_pages]:
            lost = borrower.first_lost(self._loans.readable)
            can_repeat = repeats(borrower.request.model, self._core.layout.groups)
            if lost is None and can_repeat and borrower.asks_again():
                continue
            borrower.request.is_spoiled = True  # a state was advanced with what was read
            actions += self._lose(borrower, lost or 0)
        return actions

    def on_ended(self, request: Request) -> list[Action]:
        name = request.request_id
        self.placed.pop(name, None)
        borrower = self.borrowers.get(name)
        if borrower is not None:
            return self._forget(borrower)
        joining = self.joining.get(name)
        if joining is None or joining.request is not request:
            return []  # a later attempt at it may join, while this one's last step ends
        del self.joining[name]
        return self._give_back(joining.cut(0))

    # ------------------------------------------------------------------ requests that join

    def join(self, request: Request) -> list[Action]:
        """Let a new request share the loans of the request with most of the same text.

        :returns: empty if no other has more of the text than is cached; else the request waits for
            :meth:`take_joined`.
        """
        if not resumes(request.model, self._core.layout.groups):
            return []
        best_count, best = 0, None
        for other in self.borrowers.values():
            count = self._common(request, other)
            if count > best_count:
                best_count, best = count, other
        cached_tokens = self._scheduler.cached_prompt_tokens
        if best is None or best_count * self.section_tokens <= cached_tokens(request):
            return []
        borrower = DistributedRequest(request, NEVER_HELD, by_queries=best.by_queries)
        self.joining[request.request_id] = borrower
        actions: list[Action] = []
        for section in best.sections[:best_count]:
            loan, loan_actions = self._loans.share(
                section.loan, self._agent.now, JOIN_TICKS, step_ticks=self.step_ticks
            )
            borrower.sections.append(RemoteSection(section.creditor, loan))
            actions += loan_actions
        return actions

    def take_joined(self) -> list[Request]:
        """Return the requests whose join attempt has ended, with or without shared loans."""
        joined, self._joined = self._joined, []
        return joined

    def _common(self, request: Request, other: DistributedRequest) -> int:
        """Return the number of common sections whose loans are valid and not recalled."""
        of, tokens = other.request, self.section_tokens
        if (of.model, of.cache_root) != (request.model, request.cache_root) or of.spec.images:
            return 0
        first_gone = other.first_lost(self._loans.readable)
        num_valid = other.away if first_gone is None else min(other.away, first_gone)
        mine, its = request.tokens(0, request.num_tokens - 1), of.tokens(0, num_valid * tokens)
        return common_prefix(mine, its) // tokens

    def _take_in_joining(self, borrower: DistributedRequest, news: LoanNews) -> list[Action]:
        actions: list[Action] = []
        if isinstance(news, LoanFilled):
            borrower.note_filled(self._loans.readable)
        else:
            index = borrower.index_of(news.loan)
            assert index is not None, "its loans have no successors yet"
            actions = self._give_back(borrower.cut(index))
        if borrower.filled == len(borrower.sections):
            request = borrower.request
            del self.joining[request.request_id]
            borrower.away = borrower.filled
            request.remote_tokens = borrower.away * self.section_tokens
            self._counts["shared"] += borrower.away
            if borrower.away:
                self.borrowers[request.request_id] = borrower
            self._joined.append(request)
        return actions

    # ------------------------------------------------------------------ recalled sections

    def _goes_on(self, borrower: DistributedRequest, index: int) -> bool:
        """Return whether a section must move to another creditor: it does not fit here."""
        request = borrower.request
        home_tokens = request.num_tokens - index * self.section_tokens
        return 0 < request.local_tokens < home_tokens

    def _on_recall(self, borrower: DistributedRequest, index: int) -> list[Action]:
        """Handle the recall of a section: it is copied back with all later ones, if they fit.

        If the request is too long for the local memory, another creditor gets the section.
        """
        if self._goes_on(borrower, index):
            borrower.sections[index].is_recalled = True
            return self._ask_others(borrower)
        before = borrower.recalled
        borrower.recalled = index if before is None else min(index, before)
        return self._give_back(borrower.cut(borrower.away))

    def _ask_others(self, borrower: DistributedRequest) -> list[Action]:
        """Request loans for recalled sections from further creditors.

        A section that no creditor takes is lost at the deadline, with all later ones.
        """
        actions: list[Action] = []
        for index in borrower.moving:
            section = borrower.sections[index]
            if section.successor is not None:
                continue
            placement = self.placed[borrower.request.request_id]
            creditor = placement.creditor(index, self._agent.now, without=section.creditor)
            if creditor:
                section.successor, loan_actions = self._ask(borrower, creditor)
                actions += loan_actions
        return actions

    def _take_in_successor(self, borrower: DistributedRequest, news: LoanNews) -> list[Action]:
        """Process an event of a loan that replaces a recalled one."""
        loan = news.loan
        section, successor = next(
            (section, section.successor)
            for section in borrower.sections
            if section.successor is not None and section.successor.loan == loan
        )
        if isinstance(news, LoanGranted) and self._is_readable(borrower, loan):
            source = self._loans.readable.get(section.loan)
            if source is not None:  # the creditor pulls from the one that recalls the section
                pages = list(chain(*source.pages))
                return self._loans.fill(loan, pages, source, step_ticks=self.step_ticks)
        if isinstance(news, LoanFilled):
            successor.is_copied = True
            return []
        self.placed[borrower.request.request_id].refuses(successor.creditor)
        section.successor = None
        return self._give_back([loan]) + self._ask_others(borrower)

    # ------------------------------------------------------------------ one request

    def _borrower(self, request: Request) -> DistributedRequest:
        new = DistributedRequest(request, request.handle)
        return self.borrowers.setdefault(request.request_id, new)

    def _sections(self, borrower: DistributedRequest) -> Sections:
        return Sections(borrower.request.model, self._core.layout.groups, self.section_tokens)

    def _ask(
        self, borrower: DistributedRequest, creditor: str
    ) -> tuple[RemoteSection, list[Action]]:
        """Request a loan for a section; even an immediate answer arrives as ``LoanNews``."""
        counts = self._sections(borrower).page_counts()
        loan, actions = self._loans.borrow(
            creditor, counts, self._agent.now, GRANT_TICKS, model=borrower.request.model
        )
        return RemoteSection(creditor, loan), actions

    def _ask_on(self, borrower: DistributedRequest) -> list[Action]:
        """Request loans for the next sections that are computed."""
        actions: list[Action] = []
        placement = self.placed.get(borrower.request.request_id)
        while borrower.next_is_computed(self.section_tokens):
            if placement is not None:
                creditor = placement.creditor(len(borrower.sections), self._agent.now)
            else:
                creditor = borrower.creditors.popleft() if borrower.creditors else ""
            if not creditor:
                break
            section, loan_actions = self._ask(borrower, creditor)
            borrower.sections.append(section)
            actions += loan_actions
        self.placed.end_blocked(borrower)
        return actions

    def _give_back(self, loans: Iterable[Loan]) -> list[Action]:
        return [action for loan in loans for action in self._loans.give_back(loan)]

    def _is_readable(self, borrower: DistributedRequest, loan: Loan) -> bool:
        """Return whether attention can read a loan, in place or by queries to the creditor.

        All sections of a request are read in the same way.
        """
        debt = self._loans.open[loan]
        creditor = debt.peer, debt.incarnation
        models = self._agent.asked_models
        is_answered = models is None or borrower.request.model in models
        asks = is_answered and creditor in self._agent.answering
        if not borrower.away:
            borrower.by_queries = asks
        return asks if borrower.by_queries else creditor in self._agent.neighbours

    def _cut_moved(self, borrower: DistributedRequest, rows: NewPages) -> list[Action]:
        """End loans that creditors fill from pages that a step moves; they are requested again.

        :param rows: new pages of the plan, [m, :class:`.NewPageRow`].  The actions are
            executed before its step runs.
        """
        filling = range(borrower.filled, len(borrower.sections))
        local = rows[rows[:, NewPageRow.HANDLE] == borrower.handle] if filling else rows[:0]
        moved = [number for number in self._sections(borrower).of_rows(local) if number in filling]
        return self._give_back(borrower.cut(min(moved))) if moved else []

    def _rows(
        self, borrower: DistributedRequest, sections: Iterable[int]
    ) -> list[tuple[int, int, int, int]]:
        """Return the table rows of sections read in place (:class:`.NewPageRow`)."""
        if borrower.by_queries:
            return []
        return [
            (borrower.handle, *place, page)
            for index in sections
            for place, page in self._beyond(borrower, index).items()
        ]

    def _beyond(self, borrower: DistributedRequest, section: int) -> dict[Place, PageId]:
        """Return a creditor's pages of a section, numbered as pages after the own pool."""
        readable = self._loans.readable[borrower.sections[section].loan]
        first = self._agent.neighbours[readable.peer, readable.incarnation]
        return self._sections(borrower).beyond(readable.pages, first, section)

    def _rights(self, borrower: DistributedRequest) -> list[BorrowedPages]:
        """Return the rights that must be valid until a step that computes the request has ended."""
        away = [section.loan for section in borrower.sections[: borrower.away]]
        loans = [*away, *(borrower.ends if borrower.returning else ())]
        rights = [self._loans.readable.get(loan) for loan in loans]
        # Encode a revoked right as invalid, so that the row is missed.
        rows = [("", 0, 0) if r is None else (r.peer, r.incarnation, r.right) for r in rights]
        return [BorrowedPages(borrower.handle, *row, borrower.by_queries) for row in rows]

    def _send_away(self, borrower: DistributedRequest, sections: int) -> None:
        """Make exactly the first ``sections`` sections remote."""
        borrower.away = sections
        borrower.request.remote_tokens = sections * self.section_tokens
        self._core.send_away(borrower.handle, borrower.request.remote_tokens)

    def _come_home(self, borrower: DistributedRequest, first: int, step: StepNumber) -> None:
        """Make sections from ``first`` on local; they are copied once they have pages."""
        self._counts["returned"] += borrower.away - first
        for index in range(first, borrower.away):
            borrower.returning.update(self._beyond(borrower, index))
        borrower.end_with(step, borrower.cut(first))
        borrower.recalled = None
        borrower.creditors.clear()
        self._send_away(borrower, first)

    def _lose(self, borrower: DistributedRequest, index: int) -> list[Action]:
        """Handle the loss of a section: the request recomputes it and all later ones."""
        request = borrower.request
        self._counts["lost"] += borrower.away - index
        if request.state is not RequestState.RUNNING or request.finish_reason is not None:
            return self._forget(borrower)
        if borrower.has_pages:
            self._scheduler.seats.start_again(request)
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
        loans = borrower.cut(sections) + borrower.ends
        borrower.starts_again(sections)
        request.remote_tokens = sections * self.section_tokens
        borrower.handle = request.handle if is_in else borrower.handle
        return self._give_back(loans)

    def _forget(self, borrower: DistributedRequest) -> list[Action]:
        borrower.request.remote_tokens = 0
        del self.borrowers[borrower.request.request_id]
        return self._give_back([*borrower.cut(0), *borrower.ends])
