"""Requests that move between instances with their computed pages.

At the instance that computes a prompt (``Submit.goes_to``)::

    ANNOUNCED ──room there──► WAITING ──► RUNNING ──first token──► MOVING ──pulled──► moved
        │                        │            │                       │
        └──── no room there, the other side dies, too long ───────────┴──► it runs here

At the receiver, ``Prepare`` reserves pages; once they are filled, a request begins with its first
tokens computed.  The sender may offer pages when the last chunk is planned; the receiver then pulls
them layer by layer while that chunk is computed.  The sender owns a request until the receiver has
all of it, so if either side dies, the other can continue.  A request may also leave in the middle
of its answer, wait for a third instance's pages of its prompt, and have its text sent back when it
has ended.  Pure: it takes messages and returns actions (:mod:`kvell.mempool.transfers.actions`).
"""

from collections import deque
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass

from typing_extensions import override

from kvell.engine.lending.borrowing_requests import BorrowingRequests
from kvell.engine.moving.encoding import (
    ArrivedRequest,
    decode_arrival,
    encode_announcement,
    encode_handover,
    is_cancelled,
    is_legible,
    places_of,
)
from kvell.engine.moving.pool_part import NO_NEWS, NO_PAGES, Computes, PoolNews, PoolPart
from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.protocol.messages import Cancel, Submit
from kvell.engine.requests.cache_roots import LONG, RESERVED, long_root
from kvell.engine.requests.counting import pages_bytes
from kvell.engine.requests.plan import NewPages, StepPlan
from kvell.engine.requests.request import NO_HANDLE, Request, RequestState
from kvell.memory import GroupKind, GroupSpec, Ints
from kvell.mempool.agent import Agent
from kvell.mempool.entries import PeerEntry, Ticked
from kvell.mempool.holds import Hold
from kvell.mempool.loans.actions import LoanFilled, LoanNews
from kvell.mempool.owners import Tick
from kvell.mempool.rendezvous import DEFAULT_PD_CACHING, PdCaching
from kvell.mempool.transfers.actions import Action, Arrived, Ended, Fetched, RoomGranted
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transfers.methods import LayerPull, StreamCosts, pays_by_layer
from kvell.mempool.transfers.receiving import owner_of
from kvell.pages.stages import stages_of
from kvell.vocabulary import RequestId, StepNumber

HANDOVER_TICKS: Tick = 600_000
"""Longest time from a request's announcement until it is pulled, including time in the queue."""


@dataclass
class Departure:
    """A request that moves to another instance, or will move.

    :ivar length: number of announced tokens: the text that is computed when it moves.
    :ivar returns_to: the instance that gets its text when it has ended; "" for none.
    :ivar transfer: the transfer of its pages; None before it is announced.

    ::

        ANNOUNCED ──computed up to its length──► MOVING, out of the steps ──pulled──► moved
            └─────────── no room there, the other side dies, too long ──┴──► it stays

    A request in the CPU buffer is announced when it leaves, and its pages are read there.
    """

    request: Request
    length: int
    root: str
    returns_to: str
    is_moving: bool = False
    transfer: Transfer | None = None


COPY_TICKS: Tick = 60_000
"""Longest time of a copy; after that, the request stays."""


@dataclass
class _Leaving:
    """A request that will leave.

    ::

        asked ──decodes──► COPYING ──all is there──► READY ──after a step──► moves, like any request
                              └── no room there, it dies, too long ──► stays

    The request runs on while its computed pages are copied to the target and cached there.  Then it
    leaves the steps, and moves with the few tokens since.  A request in the CPU buffer is READY: it
    computes nothing, so there is no copy, and it moves as it is.  Source: Llumnix §4.1; DESIGN §9.

    :ivar copy: transfer of its computed pages; None before, and if there was nothing to copy.
    """

    request: Request
    target: str
    copy: Transfer | None = None
    is_copied: bool = False


def _is_between_steps(request: Request) -> bool:
    runs = request.state is RequestState.RUNNING and request.finish_reason is None
    return runs and request.is_decoding and request.settled == request.computed


MOVABLE = frozenset(GroupKind) - {GroupKind.DROPPING}
"""Kinds whose pages are all the state of computed tokens; embeddings are not needed any more."""


def staying_reason(request: Request, groups: Sequence[GroupSpec]) -> str:
    """Return why a request must be served where its prompt is computed; "" if it can move."""
    seen = [group for group in groups if group.model == request.model]
    if request.spec.images and any(group.counts_images for group in seen):
        return "its pages hold images among the text"
    if request.is_scored:
        return "its prompt logprobs are reported here"
    if request.spec.pooling:
        return "it generates no tokens"
    if any(group.kind not in MOVABLE for group in seen):
        return "its model has pages that cannot be moved yet"
    return ""


def handed_over_root(root: str, pd_caching: PdCaching, unique: str) -> str:
    """Return the cache root of a request at the instance that it moves to.

    :param root: the cache root at the instance that computes its prompt.
    :param unique: a name of the request that is unique among all instances.
    """
    if pd_caching >= 2:
        return root
    unshared = f"{RESERVED}moved {unique}"
    return long_root(unshared) if root.startswith(LONG) else unshared


JOINS = 0
"""The number that a request awaits while it shares loans; no fetch has this number."""
FETCH_TICKS: Tick = 2_000
"""Longest time that a request waits for another instance's pages of its prompt."""
RECALL_TICKS: Tick = 2_000  # then the creditor takes its pages back
RETURN_TICKS: Tick = 60_000
"""Longest time until an instance has the text of a request that has ended."""


class Handovers(PoolPart):
    """The moving requests of one engine core.

    :param agent: the instance's agent, over the scheduler's memory core.
    :param model_lens: by model, the most tokens of a request that borrows nothing.
    :param streams: cost of pulls that begin before the pass has ended; None: no pull does.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        agent: Agent,
        model_lens: Mapping[str, int],
        pd_caching: PdCaching = DEFAULT_PD_CACHING,
        streams: StreamCosts | None = None,
    ) -> None:
        super().__init__()
        self._core, self._scheduler, self.agent = agent.core, scheduler, agent
        self._streams = streams
        self._departures: dict[RequestId, Departure] = {}
        self._num_moving = 0
        """The number of departures that have left the steps."""
        self.pd_caching: PdCaching = pd_caching
        self._leaving: dict[RequestId, _Leaving] = {}
        self.borrowed: BorrowingRequests = BorrowingRequests(scheduler, agent, model_lens)
        self._commands: dict[RequestId, Submit] = {}
        self._awaited: dict[int, set[Transfer | int]] = {}
        """Replies awaited by each request's number: of a transfer, of a fetch, or ``JOINS``."""
        self._fetching: dict[int, Request] = {}
        self._actions: list[Action] = []
        self._loans = self._loaned_bytes = 0
        self._open: tuple[Sized, ...] = (
            self._awaited,
            self._departures,
            self._leaving,
            *self.borrowed.open,
            *agent.open,
        )
        agent.receiving.admits = scheduler.admission.has_room_for
        agent.receiving.is_legible = is_legible
        agent.lending.is_wanted = scheduler.wants_memory
        if scheduler.swapping is not None and scheduler.buffer_large is not None:
            swapping = scheduler.swapping
            agent.read_buffer(swapping.buffer, scheduler.buffer_large, swapping.cached_pages)
        if scheduler.offloaded is not None:
            scheduler.offloaded.is_leaving = self._is_departing

    @override
    def watch_insertions(self, computes: Computes) -> None:
        def watch(hold: Hold) -> None:
            computes(hold.handle, hold.model, hold.root, lambda start, end: hold.tokens[start:end])

        self.agent.holds.watch = watch

    @property
    @override
    def is_quiet(self) -> bool:
        return not (self._actions or self._stays or any(self._open))

    @property
    @override
    def num_idle(self) -> int:
        return len(self._awaited) + self._num_moving

    @property
    @override
    def wants_fence(self) -> bool:
        # A request leaves between two steps, and a step that reads lent pages may not count.
        return bool(self._departures or self._leaving or len(self.borrowed))

    @property
    @override
    def holds_pages(self) -> bool:
        return bool(self.agent.holds or self._num_moving or len(self.borrowed))

    @property
    @override
    def next_deadline(self) -> Tick | None:
        times = self.agent.next_deadline, self.borrowed.placed.next_deadline
        return min((at for at in times if at is not None), default=None)

    @override
    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    @override
    def enter(self, request: Request, command: Submit) -> bool:
        self.borrowed.place(request, command.placement)
        if staying_reason(request, self._core.layout.groups):
            return False
        self._commands[request.request_id] = command
        awaited: set[Transfer | int] = set()
        if command.goes_to:
            unique = f"{self.agent.instance}/{self.agent.incarnation}/{request.number}"
            root = handed_over_root(request.cache_root, self.pd_caching, unique)
            returns_to = self.agent.instance if self.pd_caching == 3 else ""
            departure = Departure(request, request.num_tokens, root, returns_to)
            awaited.add(self._announce(command.goes_to, departure))
        if command.pulls_from:
            awaited.add(self._fetch(request, command.pulls_from))
        elsewhere = bool(awaited) or request.handle != NO_HANDLE
        joining = [] if elsewhere else self.borrowed.join(request)
        awaited |= {JOINS} if joining else set()
        if awaited:
            self._awaited[request.number] = awaited
        self.sort_actions(joining)
        return bool(awaited)

    @override
    def begin_migration(self, request: Request, target: str, *, rests: bool) -> None:
        if self._is_departing(request):
            return
        if request.request_id not in self._commands or self.borrowed.has(request):
            self._stays.append(request)  # it cannot move
            return
        self._leaving[request.request_id] = _Leaving(request, target)
        self._actions += self._left(rests=rests)

    @override
    def move_kvcache(self, request: Request, num_blocks: int, dst: str) -> str:
        if self._is_departing(request):
            return "it will move to another instance"
        problem = self.borrowed.move_kvcache(request, num_blocks, dst)
        self.sort_actions([] if problem else self.borrowed.advance())
        return problem

    def _is_departing(self, request: Request) -> bool:
        return request.request_id in self._departures

    def _departure_of(self, transfer: Transfer) -> Departure | None:
        departures = (each for each in self._departures.values() if each.transfer == transfer)
        return next(departures, None)

    def _announce(self, target: str, departure: Departure) -> Transfer:
        request, now = departure.request, self.agent.now
        command = self._commands[request.request_id]
        departure.transfer, actions = self.agent.sending.begin(
            target,
            request.tokens(0, departure.length),
            departure.length,
            now,
            now + HANDOVER_TICKS,
            root=departure.root,
            model=request.model,
            inserts=False,
            private=encode_announcement(command, request),
            images=request.images,
        )
        self._departures[request.request_id] = departure
        self._actions += actions
        return departure.transfer

    def _fetch(self, request: Request, source: str) -> int:
        """Request another instance's pages of the prompt, beyond the pages cached here."""
        tokens = request.tokens(0, request.num_tokens)
        number, actions = self.agent.asking.ask(
            source,
            tokens,
            self.agent.now,
            self.agent.now + FETCH_TICKS,
            root=request.cache_root,
            model=request.model,
            beyond=self._core.peek(tokens, request.cache_root, model=request.model),
        )
        self._fetching[number] = request
        self._actions += actions
        return number

    @override
    def send_back(self, request: Request) -> None:
        is_here = request.returns_to in ("", self.agent.instance)
        if is_here or request.finish_reason not in ("stop", "length"):
            return
        _, actions = self.agent.copies.begin(
            request.returns_to,
            request.tokens(0, request.settled),
            self.agent.now,
            self.agent.now + RETURN_TICKS,
            root=request.cache_root,
            model=request.model,
            beyond=len(request.prompt),
        )
        self._actions += actions

    @override
    def on_entry(self, entry: PeerEntry, *, is_owed_a_result: bool = False) -> PoolNews:
        if isinstance(entry, Ticked) and is_owed_a_result:
            self.agent.now = entry.now
            return NO_NEWS
        actions = self.agent.handle(entry)
        if isinstance(entry, Ticked) and len(self.borrowed):
            actions += self.borrowed.advance()
        return self.sort_actions(actions)

    @override
    def on_planned(self, plan: StepPlan, requests: Sequence[Request]) -> tuple[int, ...]:
        """Offer the pages that a step completes, where pulling them meanwhile pays.

        :returns: the numbers of the transfers that are pulled during the step.
        """
        numbers: list[int] = []
        if self._streams is None or not self._departures:
            return ()
        for work, request in zip(plan.work, requests, strict=True):
            departure = self._departures.get(request.request_id)
            if departure is None or work.start + work.known != departure.length:
                continue
            transfer = departure.transfer
            assert transfer is not None, "it was announced"
            stages = len(stages_of(self._core.layout.groups, request.model))
            missing = self.agent.sending.missing(transfer)
            groups = [self._core.layout.groups[group] for group, _ in missing]
            size_bytes = sum(group.page_stride_bytes for group in groups)
            pull = LayerPull(size_bytes, len(missing), stages, plan.num_tokens)
            if not work.samples or not pays_by_layer(pull, self._streams):
                continue
            early = self.agent.sending.early(transfer, places_of(self._core, request), stages)
            numbers += [transfer.number] if early else []
            self._actions += early
        return tuple(numbers)

    @override
    def on_computed(
        self, step: StepNumber, requests: Sequence[Request], *, rests: bool
    ) -> PoolNews:
        actions = self.borrowed.advance(step) if len(self.borrowed) else []
        if not self._departures and not self._leaving:
            return self.sort_actions(actions) if actions else NO_NEWS
        for request in requests:
            departure = self._departures.get(request.request_id)
            if departure is None or request.finish_reason:
                continue
            is_complete = request.settled == departure.length < request.num_tokens
            if is_complete and not departure.is_moving:
                self._scheduler.seats.lift(request)
                actions += self._leave(departure)
        return self.sort_actions(actions + self._left(rests=rests))

    def _leave(self, departure: Departure) -> list[Action]:
        """Offer the pages of a request that was taken out of the steps."""
        request, transfer = departure.request, departure.transfer
        assert transfer is not None, "it was announced"
        departure.is_moving = True
        self._num_moving += 1
        handover = encode_handover(request, departure.root, departure.returns_to)
        places = self._scheduler.sent_places(request)
        if places is None:
            places = places_of(self._core, request)
        return self.agent.sending.ready(transfer, places, handover)

    def _left(self, *, rests: bool = False) -> list[Action]:
        """Begin the copies of migrating requests; move copied ones, with their tokens since, and
        those in the CPU buffer.
        """
        actions: list[Action] = []
        for leaving in self._leaving.values():
            is_new = leaving.copy is None and not leaving.is_copied
            if is_new and _is_between_steps(leaving.request):
                actions += self._begin_copy(leaving)
        ready = [
            leaving
            for leaving in self._leaving.values()
            if (rests and self._scheduler.can_leave_buffer(leaving.request))
            or (leaving.is_copied and _is_between_steps(leaving.request))
        ]
        for leaving in ready:
            request = leaving.request
            del self._leaving[request.request_id]
            self._scheduler.seats.lift(request)
            departure = Departure(request, request.settled, request.cache_root, request.returns_to)
            self._announce(leaving.target, departure)
            actions += self._leave(departure)
        return actions

    def _begin_copy(self, leaving: _Leaving) -> list[Action]:
        request, now = leaving.request, self.agent.now
        leaving.copy, actions = self.agent.copies.begin(
            leaving.target,
            request.tokens(0, request.settled),
            now,
            now + COPY_TICKS,
            root=request.cache_root,
            model=request.model,
        )
        leaving.is_copied = leaving.copy is None  # all of it is delta
        return actions

    @property
    @override
    def copies(self) -> tuple[int, bool]:
        mine, its = self.agent.borrowing, self.agent.lending
        is_filling = not self.is_quiet and (mine.is_filling or its.is_filling)
        return mine.num_filled + its.num_filled, is_filling

    @override
    def lent_pages(self) -> Ints:
        return self.agent.lending.page_rows() if self.agent.lending.lends else NO_PAGES

    @override
    def sections(self) -> dict[str, int]:
        counts = {"loans": self._loans, "loaned_bytes": self._loaned_bytes}
        return {"lent": len(self.agent.lending), **self.borrowed.tally(), **counts}

    @override
    def plan_borrows(self, plan: StepPlan, rows: NewPages) -> StepPlan:
        if len(self.agent.lending) and self._scheduler.lacks_memory(plan):
            counts = [int(group.kind is GroupKind.FULL) for group in self._core.layout.groups]
            self.sort_actions(self.agent.lending.recall(counts, self.agent.now, RECALL_TICKS))
        plan, actions = self.borrowed.on_planned(plan, rows)
        self._actions += actions
        return plan

    @override
    def on_missed(self, handles: Sequence[int]) -> None:
        self._actions += self.borrowed.on_missed(handles)

    @override
    def on_cancelled(self, command: Cancel) -> None:
        receiving = self.agent.receiving
        self._actions += receiving.refuse(lambda announced: is_cancelled(announced, command))

    @override
    def on_ended(self, request: Request) -> None:
        self._actions += self.borrowed.on_ended(request)
        self._commands.pop(request.request_id, None)
        self._leaving.pop(request.request_id, None)  # a copy that runs is completed
        self._awaited.pop(request.number, None)
        departure = self._departures.get(request.request_id)
        if departure is not None and departure.transfer is not None:
            self._forget(departure)
            actions = self.agent.sending.cancel(departure.transfer, "the request has ended")
            # The caller needs no report of this end.
            self._actions += [action for action in actions if not isinstance(action, Ended)]

    def _forget(self, departure: Departure) -> None:
        del self._departures[departure.request.request_id]
        self._num_moving -= departure.is_moving

    def sort_actions(self, actions: Sequence[Action]) -> PoolNews:
        """Process actions that concern requests, and queue the others for :meth:`take_actions`."""
        moved, came = list[Request](), list[ArrivedRequest]()
        pending = deque(actions)
        while pending:
            action = pending.popleft()
            if isinstance(action, RoomGranted):
                departure = self._departure_of(action.transfer)
                if departure is not None:
                    self._answered(departure.request, action.transfer)
            elif isinstance(action, Ended):
                moved += self._ended(action)
            elif isinstance(action, Fetched):
                request = self._fetching.pop(action.number)
                request.pulled_bytes += pages_bytes(action.pages, self._core.layout.groups)
                self._answered(request, action.number)
            elif isinstance(action, LoanNews):
                borrowing = self.agent.borrowing
                if isinstance(action, LoanFilled) and not borrowing.is_shared(action.loan):
                    pages = [len(pages) for pages in borrowing.readable[action.loan].pages]
                    self._loans += 1
                    self._loaned_bytes += pages_bytes(pages, self._core.layout.groups)
                pending.extend(self.borrowed.take_in(action))
                for request in self.borrowed.take_joined():
                    self._answered(request, JOINS)
            elif isinstance(action, Arrived):
                if not action.is_inserted:
                    handle = self.agent.holds.claim(owner_of(action.transfer))
                    came.append(
                        decode_arrival(action.announced, action.private, action.computed, handle)
                    )
            else:
                self._actions.append(action)
        return PoolNews(moved, came)

    def _answered(self, request: Request, what: Transfer | int) -> None:
        """Record an answer of another instance; enqueue the request once all have answered."""
        awaited = self._awaited.get(request.number)
        if awaited is None or what not in awaited:
            return
        awaited.remove(what)
        if not awaited:
            del self._awaited[request.number]
            self._scheduler.seats.waiting.add(request)

    def _ended(self, action: Ended) -> list[Request]:
        departure = self._departure_of(action.transfer)
        size_bytes = pages_bytes(action.pages, self._core.layout.groups)
        if departure is None:
            copied = (each for each in self._leaving.values() if each.copy == action.transfer)
            if (leaving := next(copied, None)) is not None:
                leaving.is_copied = not action.problem
                leaving.request.moved_bytes += size_bytes
                if action.problem:
                    del self._leaving[leaving.request.request_id]
                    self._stays.append(leaving.request)
            self._actions += self._left()
            return []
        self._forget(departure)
        request = departure.request
        request.moved_bytes += size_bytes
        self._answered(request, action.transfer)
        if action.problem:
            self._stays.append(request)
        if departure.is_moving and action.problem:
            self._scheduler.seats.go_on(request)
        return [request] if departure.is_moving and not action.problem else []
