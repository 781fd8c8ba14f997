"""Sections of running requests whose pages lie in the memory of other instances, the creditors.

::

    computed here ──move_kvcache──► ASKED ──granted──► FILLING ──filled──► AWAY, read there
         ▲                            │                   │                  │
         │◄──── refused, no creditor ─┴───────────────────┘                  │ recalled
         └────────── copied back, or computed anew from there on if lost ◄───┘

Sections go in order, from the first of a text on, so what is left here is always its end.  The
last section never goes: a request writes there.  On one host what is away is read in place, since a
creditor's pool continues the numbers of the pool's own pages
(:mod:`kvell.mempool.transports.neighbours`); elsewhere its creditor is asked for attention over it
(:mod:`kvell.models.fused.partials`), and what is wanted back is computed anew, not copied.

A request that is longer than the memory here comes with a placement.  What is recalled of it, and
has no room here, goes to another creditor, which pulls it from the one that wants it back.

A request that gives way, or loses a section, keeps those before it where they are, and goes on
behind them once it is let in again.

Pure: the loans themselves are a machine of the memory pool (:mod:`kvell.mempool.loans`).
Source: Infinite-LLM §4, §5.2.1, §6.2 (Listing 1).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvell.engine.lending.borrower import Borrower
from kvell.engine.lending.joining import JoiningRequests
from kvell.engine.lending.placement import Placement
from kvell.engine.lending.recalls import Recalls
from kvell.engine.lending.section_loans import SectionLoans
from kvell.engine.lending.sections import local_reason, repeats, resumes
from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.requests.plan import BorrowedPages, NewPages, PageCopy, StepPlan
from kvell.engine.requests.request import Request, RequestState
from kvell.mempool.agent import Agent
from kvell.mempool.loans.actions import (
    LoanFilled,
    LoanGranted,
    LoanNews,
    LoanRecalled,
)
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import Action
from kvell.vocabulary import RequestId, StepNumber

NO_ROWS = np.empty((0, 4), np.int32)


class Borrowed:
    """The borrowing requests of one engine core: what an rManager does for a debtor.

    :param agent: of the instance, over the scheduler's memory core.
    """

    def __init__(self, scheduler: Scheduler, agent: Agent) -> None:
        self._core, self._scheduler, self._agent = agent.core, scheduler, agent
        self.sections = SectionLoans(agent, scheduler.limits.section_tokens)
        self._returned = self._lost = 0
        self._borrowers: dict[RequestId, Borrower] = {}
        self._placements: dict[RequestId, Placement] = {}
        self._recalls = Recalls(agent, self.sections, self._placements)
        self._joins = JoiningRequests(self.sections, scheduler.cached_prompt_tokens)
        self._given_up: list[Request] = []
        self._planned = self._done = StepNumber(0)

    @property
    def section_tokens(self) -> int:
        """Tokens that go at once."""
        return self.sections.section_tokens

    def __len__(self) -> int:
        return len(self._borrowers) + len(self._placements) + len(self._joins)

    def has(self, request: Request) -> bool:
        """Whether any of a request's pages are elsewhere, on their way, or will be."""
        name = request.request_id
        return name in self._borrowers or name in self._placements or request in self._joins

    @property
    def next_deadline(self) -> Tick | None:
        """When :meth:`advance` has something to do."""
        found = (one.retry_at for one in self._placements.values())
        return min((at for at in found if at is not None), default=None)

    def sections_asked(self, request: Request) -> int | None:
        """Return how many sections are elsewhere or on their way; None for a placed request."""
        borrower = self._borrowers.get(request.request_id)
        asked = 0 if borrower is None else len(borrower.loans)
        return None if request.request_id in self._placements else asked

    def sections_away(self, request: Request) -> int:
        """Return how many of a request's sections are read elsewhere."""
        borrower = self._borrowers.get(request.request_id)
        return 0 if borrower is None else borrower.away

    def tally(self) -> dict[str, int]:
        """Return sections ``borrowed`` now, and those so far of each end, and ``shared`` ones."""
        return {
            "borrowed": sum(one.away for one in self._borrowers.values()),
            "returned": self._returned,
            "replaced": self._recalls.replaced,
            "shared": self._joins.shared,
            "lost": self._lost,
        }

    def placements(self) -> tuple[RequestPlacementEntry, ...]:
        """Where the sections lie of requests of which some are elsewhere, or on their way."""
        return tuple(e for one in self._borrowers.values() for e in self.sections.placed(one))

    def place(self, request: Request, entries: Sequence[RequestPlacementEntry]) -> None:
        """Let a new request that is longer than the memory here lie where the entries say."""
        if entries:
            here = sum(entry.num_blocks for entry in entries if entry.local)
            request.local_tokens = here * self.section_tokens
            self._placements[request.request_id] = Placement.of(request, entries)

    def join(self, request: Request) -> list[Action]:
        """Let a new request go on behind what another one has elsewhere of the same text.

        :returns: nothing if none has; else it waits until :meth:`take_joined` has it.
        """
        if not resumes(request.model, self._core.layout.groups):
            return []
        return self._joins.begin(request, self._borrowers.values())

    def take_joined(self) -> list[Request]:
        """Return requests whose creditors have answered."""
        joined = self._joins.take_answered()
        self._borrowers |= {one.request.request_id: one for one in joined if one.away}
        return [one.request for one in joined]

    def take_given_up(self) -> list[Request]:
        """Return requests for which nobody has had memory for too long."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def move_kvcache(self, request: Request, num_blocks: int, dst: str) -> str:
        """Let further sections of a request go to a creditor, as far as they are computed in time.

        :param num_blocks: sections of ``SECTION_TOKENS`` tokens.
        :param dst: the creditor, which may refuse each of them.
        :returns: why none goes; "" if they may.
        """
        problem = local_reason(request.model, self._core.layout.groups) or request.local_reason
        if problem or num_blocks < 1:
            return problem or "no section is to go"
        if request.state is not RequestState.RUNNING:
            return "it does not run"
        if dst in self._agent.out_of_reach:
            return f"{dst} cannot be read in place"
        placement = self._placements.get(request.request_id)
        if placement is not None:
            placement.widen(dst)
            return ""
        borrower = self._borrower(request)
        borrower.creditors.clear()  # a plan replaces what is left of the one before
        borrower.creditors.extend([dst] * num_blocks)
        return ""

    def advance(self, done: StepNumber | None = None) -> list[Action]:
        """Ask for room for sections that are computed; to be called between steps.

        :param done: the latest step that is over; None if that is known.
        """
        self._done = self._done if done is None else done
        actions: list[Action] = []
        for placement in list(self._placements.values()):
            request = placement.request
            borrower = self._borrowers.get(request.request_id)
            is_asking = borrower is not None and len(borrower.loans) > borrower.filled
            steps = self.sections.step_ticks
            if placement.tick(self._agent.now, is_asking=is_asking, step_ticks=steps):
                self._given_up.append(request)
            elif request.state is RequestState.RUNNING:
                self._borrower(request)
        for borrower in list(self._borrowers.values()):
            if not borrower.has_pages:
                actions += self._keep(borrower)
                continue
            actions += self.sections.give_back(borrower.take_ends(self._done))
            actions += self._recalls.ask_others(borrower) if borrower.wanted_back else []
            actions += self._ask_on(borrower)
            is_over = not (borrower.creditors or borrower.returning or borrower.ends)
            if is_over and not borrower.loans:
                del self._borrowers[borrower.request.request_id]
        return actions

    def take_in(self, news: LoanNews) -> list[Action]:
        """Act on what happened to a loan; to be called between steps."""
        borrower = self.sections.borrower(news.loan)
        if borrower is None:
            return []
        if borrower.request in self._joins:
            return self._joins.take_in(borrower, news)
        if news.loan not in borrower.loans:
            return self._recalls.take_in(borrower, news) if borrower.has_pages else []
        index = borrower.loans.index(news.loan)
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
                return self._recalls.recalled(borrower, index)
            return self._lose(borrower, index)
        # Nobody reads it yet.  Later sections stay here too, so that the rest is one run.
        borrower.creditors.clear()
        if placement is not None:
            placement.refuses(borrower.creditor_of[news.loan])
        cut = self.sections.cut(borrower, index)
        return self.sections.give_back(cut) + self._ask_on(borrower)

    def before_plan(self, step: StepNumber) -> NewPages:
        """Let filled sections go, and recalled ones come home, before a step is planned.

        :returns: tables' rows [m, 4] of what is read elsewhere from now on.
        """
        self._planned = step
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
                    self._come_home(borrower, borrower.recalled)
                continue
            sections = self._replace(borrower) if borrower.replaced else []
            if borrower.filled > borrower.away and borrower.recalled is None:
                sections += range(borrower.away, borrower.filled)
                self._send_away(borrower, borrower.filled)
            rows += self.sections.rows(borrower, sections)
        return np.array(rows, np.int32).reshape(-1, 4)

    def planned(self, plan: StepPlan, rows: NewPages) -> tuple[StepPlan, list[Action]]:
        """Return the plan with what it reads elsewhere and copies home, and what comes before it.

        :param rows: of :meth:`before_plan`.
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
            if not was_in and borrower.has_pages:  # this plan lets it in
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

    def missed(self, handles: Sequence[int]) -> list[Action]:
        """Act on rows that do not count: their requests compute what they lost anew."""
        actions: list[Action] = []
        late = [one for one in self._borrowers.values() if one.handle in handles]
        for borrower in [one for one in late if one.has_pages]:
            lost = self.sections.first_lost(borrower)
            can_repeat = repeats(borrower.request.model, self._core.layout.groups)
            if lost is None and can_repeat and borrower.asks_again():
                continue
            borrower.request.is_spoiled = True  # a state was advanced from what was read
            actions += self._lose(borrower, lost or 0)
        return actions

    def ended(self, request: Request) -> list[Action]:
        """A request ends here, however: creditors get their memory back."""
        self._placements.pop(request.request_id, None)
        borrower = self._borrowers.get(request.request_id)
        return self._joins.end(request) if borrower is None else self._forget(borrower)

    def audit(self) -> list[str]:
        """Every contradiction in what is away, a sentence for each."""
        problems = self._joins.audit()
        for one in self._borrowers.values():
            problems += [*one.audit(self.section_tokens), *self.sections.audit(one)]
        return problems

    # ------------------------------------------------------------------ one request

    def _borrower(self, request: Request) -> Borrower:
        """The borrower that a running request is, from now on if it was none."""
        if request.request_id not in self._borrowers:
            self._borrowers[request.request_id] = Borrower(request, request.handle)
        return self._borrowers[request.request_id]

    def _ask_on(self, borrower: Borrower) -> list[Action]:
        """Ask for room for the next sections, as far as they are computed."""
        actions: list[Action] = []
        while borrower.next_is_computed(self.section_tokens):
            creditor = self._next_creditor(borrower)
            if not creditor:
                break
            loan, asked = self.sections.ask(borrower, creditor)
            borrower.loans.append(loan)
            actions += asked
        return actions

    def _next_creditor(self, borrower: Borrower) -> str:
        """Who is to have the next section; "" for nobody."""
        placement = self._placements.get(borrower.request.request_id)
        if placement is None:
            return borrower.creditors.popleft() if borrower.creditors else ""
        at, last = len(borrower.loans), len(placement.planned)
        return placement.creditor(at, self._agent.now) if at < last else ""

    def _replace(self, borrower: Borrower) -> list[int]:
        """Read sections where they are now; returns which."""
        sections, over = self._recalls.replace(borrower)
        borrower.end_with(self._planned, over)
        return sections

    def _send_away(self, borrower: Borrower, sections: int) -> None:
        """Let the first sections be elsewhere, and no others."""
        borrower.away = sections
        borrower.request.away_tokens = sections * self.section_tokens
        self._core.send_away(borrower.handle, borrower.request.away_tokens)

    def _come_home(self, borrower: Borrower, first: int) -> None:
        """Ask for pages here for sections from ``first`` on; they are copied once they are had."""
        self._returned += borrower.away - first
        for index in range(first, borrower.away):
            borrower.returning.update(self.sections.beyond(borrower, index))
        borrower.end_with(self._planned, self.sections.cut(borrower, first))
        borrower.recalled = None
        borrower.creditors.clear()
        self._send_away(borrower, first)

    def _lose(self, borrower: Borrower, index: int) -> list[Action]:
        """A section that a request needs is gone: it computes it anew, and all behind it."""
        request = borrower.request
        self._lost += borrower.away - index
        if request.state is not RequestState.RUNNING or request.finish_reason is not None:
            return self._forget(borrower)
        if borrower.has_pages:
            self._scheduler.start_again(request)
        return self._keep(borrower, index)

    def _keep(self, borrower: Borrower, most: int | None = None) -> list[Action]:
        """A request has given its pages back, and may have been let in again since.

        Its first sections stay where they are, if it can go on behind them.

        :param most: of its sections; None: all that are elsewhere.
        """
        request = borrower.request
        most = borrower.away if most is None else min(most, borrower.away)
        sections = min([most, *borrower.wanted_back])
        if not resumes(request.model, self._core.layout.groups) or request.finish_reason:
            sections = 0
        is_in = request.state is RequestState.RUNNING
        if is_in and request.away_tokens != sections * self.section_tokens:
            sections = 0  # all of that lies here
        if not sections:
            return self._forget(borrower)
        loans = self.sections.cut(borrower, sections) + borrower.ends
        borrower.starts_again(sections)
        request.kept_tokens = 0 if is_in else sections * self.section_tokens
        borrower.handle = request.handle if is_in else borrower.handle
        return self.sections.give_back(loans)

    def _forget(self, borrower: Borrower) -> list[Action]:
        borrower.request.kept_tokens = 0
        del self._borrowers[borrower.request.request_id]
        return self.sections.give_back([*self.sections.cut(borrower, 0), *borrower.ends])
