"""One incarnation of an instance in virtual time: the engine's core and agent, and their actions.

::

    inbox ──► EngineLoop ──► actions ──► Network
                  │   ▲ └─────► events ───► the front
             plan ▼   │ commit, after the step's seconds
                  Device

As in an instance's process, inputs that arrive during a step are handled after it, and the right to
read a page changes before the next step is planned. When the front answers a step's events, the
next one has begun; an instance that is alone, as in a library, begins it after these answers.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs
from typing_extensions import override

from kvell.engine.core.core import EngineCore
from kvell.engine.core.index_watch import IndexWatch
from kvell.engine.core.journal import Journal
from kvell.engine.core.loop import EngineLoop, PoolIO
from kvell.engine.moving.handovers import Handovers
from kvell.engine.protocol.messages import (
    HEARTBEAT_SECONDS,
    Cancel,
    Event,
    Heartbeat,
    Migrate,
    MoveKvCache,
    Submit,
)
from kvell.engine.protocol.notices import WatchIndex
from kvell.engine.requests.plan import BorrowedPages, StepPlan, StepResult, TeamTime
from kvell.errors import TryLater
from kvell.mempool.agent import Agent
from kvell.mempool.entries import BY_QUERIES, NOT_IN_PLACE, PeerEntry, PeerLost, PeerMapped
from kvell.mempool.loans.messages import Filled, Loan, Recall
from kvell.mempool.owners import Tick
from kvell.mempool.transfers.actions import (
    Action,
    Grant,
    Pull,
    PullRest,
    Revoke,
    Send,
    StopPull,
)
from kvell.mempool.transfers.messages import Offer, Prepared, Written
from kvell.mempool.transfers.receiving import owner_of
from kvell.mempool.transports.neighbours import MappingSlots, num_places
from kvell.simulator.cluster.device import Device
from kvell.simulator.cluster.loop import Loop
from kvell.simulator.cluster.meter import InstanceMeter
from kvell.simulator.cluster.network import Endpoint, Network
from kvell.simulator.cluster.reads import IN_ONE_MEMORY, NeighbourReads, PricedSteps


class PeerMappings:
    """The mapped pools of other instances, and the check of rights to read them.

    An incarnation may be mapped again before its loss is handled. Both of its mappings then exist
    for a while, and the older one is read.
    """

    def __init__(self, device: Device, pool_bytes: int, large_page_bytes: int) -> None:
        self._device, self._pool_bytes = device, pool_bytes
        count = num_places(pool_bytes, large_page_bytes)
        self._places = MappingSlots(pool_bytes, large_page_bytes, count)
        self._mapped: dict[tuple[str, int], deque[tuple[int, Endpoint]]] = {}
        self._losses: dict[tuple[str, int], deque[int]] = {}
        """Numbers of mappings that end with each loss that is not handled yet."""

    def __len__(self) -> int:
        return sum(map(len, self._mapped.values()))

    def put(self, other: Endpoint) -> int:
        """Map an instance's pages, to be read in place; return the first large page of them.

        :returns: ``NOT_IN_PLACE`` if no place is left.
        """
        try:
            first = self._places.first_free(self._pool_bytes)
            self._places.set_taken(first, self._pool_bytes, True)
            self._device.put_behind(other.device, first)
        except TryLater:
            first = NOT_IN_PLACE
        self._mapped.setdefault((other.name, other.incarnation), deque()).append((first, other))
        return first

    def lose(self, name: str, incarnation: int) -> None:
        """Record that an instance is lost, mapped or not; steps may still read it."""
        key = name, incarnation
        losses = self._losses.setdefault(key, deque())
        losses.append(len(self._mapped.get(key, ())) - sum(losses))

    def take_away(self, name: str, incarnation: int) -> None:
        """Unmap the mappings of an instance's oldest loss, which no step reads any more."""
        key = name, incarnation
        for _ in range(self._losses[key].popleft()):
            first, _ = self._mapped[key].popleft()
            if first != NOT_IN_PLACE:
                self._places.set_taken(first, self._pool_bytes, False)
                self._device.drop_behind(first)
        if not self._losses[key]:
            del self._losses[key]
        if not self._mapped.get(key):
            self._mapped.pop(key, None)

    def stands(self, pages: BorrowedPages) -> bool:
        mapped = self._mapped.get((pages.instance, pages.incarnation))
        return mapped is not None and pages.right in mapped[0][1].rights


LATEST_TICK: Tick = 1 << 50
"""Later deadlines do not exist."""

Command = Submit | Cancel | Migrate | MoveKvCache | WatchIndex
Input = Command | PeerEntry


@dataclass
class Counts:
    """Counts of an incarnation.

    :ivar arriving_tokens: of texts that were announced to it.
    :ivar arriving_hits: those of them that were cached already.
    :ivar lent: loans that it has filled, and ``recalled``: those that it claimed back.
    :ivar borrowed: rights under which its steps read others' pages: creditor, its incarnation and
        number.
    :ivar missed: rows that did not count, since a right was revoked before their read ended.
    """

    steps: int = 0
    busy_seconds: float = 0.0
    computed_tokens: int = 0
    pulls: int = 0
    arriving_tokens: int = 0
    arriving_hits: int = 0
    lent: set[Loan] = field(default_factory=set)
    recalled: set[Loan] = field(default_factory=set)
    borrowed: set[tuple[str, int, int]] = field(default_factory=set)
    missed: int = 0


@dataclass
class Record:
    """All inputs and decisions of an incarnation, for a replay."""

    journal: Journal = field(default_factory=Journal)
    plans: list[StepPlan] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)


Say = Callable[[Sequence[Event]], None]


def _nothing() -> None:
    """Do nothing."""


class VirtualInstance(PoolIO):
    """An incarnation of an instance, from its start to its death.

    :param core: with ``agent``; without it, no other instance reaches this one.
    :param reads: cost of pages that are read in place at other instances.
    :ivar watch: called after each input and each step, unless the instance is alone.
    """

    def __init__(
        self,
        core: EngineCore,
        agent: Agent,
        device: Device,
        steps: PricedSteps,
        loop: Loop,
        network: Network,
        says: Say,
        meter: InstanceMeter,
        record: Record | None = None,
        reads: NeighbourReads = IN_ONE_MEMORY,
        *,
        beats: bool = True,
    ) -> None:
        self.core, self.agent, self.device = core, agent, device
        self.name, self.incarnation = agent.instance, agent.incarnation
        self.rights: set[int] = set()
        self.counts = Counts()
        self.meter = meter
        self.record = record
        self.watch: Callable[[], None] = _nothing
        self.is_dead = False
        layout = agent.core.layout
        self.behind = PeerMappings(device, layout.pool_bytes, layout.large_page_bytes)
        self.is_alone = not isinstance(core.pool, Handovers)
        pages = PoolIO() if self.is_alone else self
        self._engine = EngineLoop(core, pages, record.journal if record else None)
        self._reads = reads
        self._answers_until_seconds = -math.inf
        self._answering_seconds = 0.0
        """Time of answers during a step, by which the next one takes longer."""
        self._copied_sections = 0
        self._steps, self._loop, self._network, self._says = steps, loop, network, says
        self._inbox: deque[Input] = deque()
        self._streaming: dict[int, tuple[str, Offer]] = {}
        """Offers of streamed pages, and their receivers, by number of the transfer."""
        self._is_busy = False
        self._wakes_at: Tick = LATEST_TICK
        self._beat_seconds = -math.inf if beats else math.inf
        self._stands_until_seconds = -math.inf

    @property
    def role(self) -> str:
        return self.name.rpartition("-")[0]

    def hear(self, entry: PeerEntry) -> None:
        if isinstance(entry, PeerLost):
            self.behind.lose(entry.peer, entry.incarnation)
        self.take(entry)

    def meet(self, other: Endpoint, *, is_near: bool) -> None:
        far = BY_QUERIES if self._steps.asks else NOT_IN_PLACE
        first = self.behind.put(other) if is_near else far
        self._inbox.append(PeerMapped(other.name, other.incarnation, first))

    def answer(self, seconds: float) -> float | None:
        """Compute attention for another instance after earlier queries; see :class:`Endpoint`."""
        if self._is_paused:
            return None
        now_seconds = self._loop.now_seconds
        self._answers_until_seconds = max(now_seconds, self._answers_until_seconds) + seconds
        self._answering_seconds += seconds if self._is_busy else 0.0
        return self._answers_until_seconds - now_seconds

    def beat(self) -> None:
        """Send a heartbeat if idle; a busy instance sends it after its step."""
        is_silent = self._is_busy or self.is_dead or self._is_paused
        if not is_silent and (beat := self._pulse()):
            self._says(beat)

    def pause(self, seconds: float) -> None:
        """Stop, as a process that is stopped: inputs wait, and a step ends later.

        Its memory is unchanged, and others read it.
        """
        until_seconds = self._loop.now_seconds + seconds
        self._stands_until_seconds = max(self._stands_until_seconds, until_seconds)
        self._loop.at(until_seconds, self._run)

    def die(self) -> None:
        """End all communication, and revoke all rights to read its pages."""
        self.is_dead = True
        self._inbox.clear()
        self.rights.clear()

    # ----------------------------------------------------------------------- loop

    def take(self, entry: Input) -> None:
        if not self.is_dead:
            self._inbox.append(entry)
            self._run()

    def _run(self) -> None:
        if self._is_busy or self.is_dead or self._is_paused:
            return
        self._is_busy = True  # inputs that this causes are handled here
        while self._inbox:
            self._say(self._handle(self._inbox.popleft()))
        self._say(self._engine.take_deadline())
        self._is_busy = False
        if self.core.has_work and self.is_alone:
            self._loop.last.append(self._begin)
        elif self.core.has_work:
            self._begin()
        self._wake_at(self._engine.deadline)

    def _handle(self, entry: Input) -> list[Event]:
        if isinstance(entry, Submit):
            events = self._engine.tell(entry)
            if not events:
                self.meter.on_submitted(entry.request_id)
            return events
        if isinstance(entry, Cancel | Migrate | MoveKvCache):
            return self._engine.tell(entry)
        events = self._engine.take_time()
        if isinstance(entry, WatchIndex):
            return events + self.core.watch_index(self._index_watch)
        if isinstance(entry, PeerLost):  # between two steps: no step reads its pool
            self.behind.take_away(entry.peer, entry.incarnation)
        return events + self._engine.take(entry)

    def _index_watch(self) -> IndexWatch:
        return IndexWatch(self.agent.core, with_tokens=False)

    @property
    def _is_paused(self) -> bool:
        return self._loop.now_seconds < self._stands_until_seconds

    def _begin(self) -> None:
        if self._is_busy or self.is_dead or self._is_paused or not self.core.has_work:
            return
        self._is_busy = True
        plan = self._engine.plan()
        if self.is_alone and plan.is_idle:
            raise RuntimeError(f"step {plan.step} computes nothing, and requests wait")
        self.meter.on_planned(plan)
        step = self._steps.begin(self, plan)
        copied = self.agent.borrowing.num_filled + self.agent.lending.num_filled
        seconds = step.seconds + self._reads.seconds(plan, self.agent.lending)
        seconds += self._answering_seconds
        seconds += (copied - self._copied_sections) * self._reads.copied_seconds
        self._copied_sections = copied
        self._answering_seconds = 0.0
        if plan.streams:
            self._tell_written(plan, seconds)
        self.counts.steps += 1
        self.counts.busy_seconds += seconds
        self.counts.computed_tokens += plan.num_tokens
        if self.record is not None:
            self.record.plans.append(plan)
        result = structs.replace(
            self.device.run(plan),
            missed=tuple(step.missed),
            team=TeamTime(threads=1, is_shared=False, thread_seconds=seconds, lost_seconds=0.0),
        )
        self._loop.after(seconds, partial(self._end, plan, result))

    def _end(self, plan: StepPlan, result: StepResult) -> None:
        """Commit a step; rows count if their rights to read others' pages are still valid."""
        if self.is_dead:
            return
        if self._is_paused:
            self._loop.at(self._stands_until_seconds, partial(self._end, plan, result))
            return
        if plan.borrowed:
            missed = {*plan.find_missed(self.behind.stands), *result.missed}
            result = structs.replace(result, missed=tuple(sorted(missed)))
            self.counts.missed += len(result.missed)
            self.counts.borrowed |= {row[1:4] for row in plan.borrowed if row.right}
        self.device.finish(plan, result.missed)
        events = self._engine.commit(result)
        late = self.meter.on_committed(events, self._loop.now_seconds)
        if late is not None:
            self._engine.note(late)
        self._say([*events, *self._pulse()])
        self._is_busy = False
        self._run()

    def _tell_written(self, plan: StepPlan, seconds: float) -> None:
        for number in plan.streams:
            target, offer = self._streaming[number]
            for stage in range(offer.stages):
                hint = Written(offer.transfer, stage)
                after_seconds = seconds * (stage + 1) / offer.stages
                self._loop.after(after_seconds, partial(self._hint, target, hint))

    def _hint(self, target: str, hint: Written) -> None:
        if self._is_paused:
            self._loop.at(self._stands_until_seconds, partial(self._hint, target, hint))
        elif not self.is_dead:
            self._network.send(self, target, hint)

    def _pulse(self) -> list[Event]:
        now_seconds = self._loop.now_seconds
        if now_seconds - self._beat_seconds < HEARTBEAT_SECONDS:
            return []
        self._beat_seconds = now_seconds
        return [Heartbeat(self.core.counters.load_stats(self.core.step))]

    # ------------------------------------------------------------------------ I/O

    def _say(self, events: Sequence[Event]) -> None:
        if events:
            self._says(events)

    @override
    def now(self) -> Tick:
        return int(self._loop.now_seconds * 1000)

    @override
    def do(self, actions: Sequence[Action], deadline: Tick | None) -> None:
        if self.record is not None:
            self.record.actions += actions
        for action in actions:
            self._act(action)
        self.watch()

    def _act(self, action: Action) -> None:
        if isinstance(action, Send):
            if isinstance(action.message, Prepared):
                self._count_arriving(action.message)
            elif isinstance(action.message, Offer) and action.message.stages:
                self._streaming[action.message.transfer.number] = action.instance, action.message
            elif isinstance(action.message, Filled):
                self.counts.lent.add(action.message.loan)
            elif isinstance(action.message, Recall):
                self.counts.recalled.add(action.message.loan)
            self._network.send(self, action.instance, action.message)
        elif isinstance(action, Pull):
            self.counts.pulls += 1
            self._network.pull(self, action)
        elif isinstance(action, PullRest):
            self._network.rest(self, action.transfer)
        elif isinstance(action, StopPull):
            self._network.stop(self, action.transfer)
        elif isinstance(action, Grant):
            self.rights.add(action.transfer.number)
        elif isinstance(action, Revoke):
            self.rights.remove(action.transfer.number)
            self._streaming.pop(action.transfer.number, None)

    def _count_arriving(self, message: Prepared) -> None:
        owner = owner_of(message.transfer)
        if owner in self.agent.holds:
            hold = self.agent.holds[owner]
            self.counts.arriving_tokens += len(hold.tokens)
            self.counts.arriving_hits += hold.hit_tokens

    def _wake_at(self, deadline: Tick | None) -> None:
        """Run at a deadline, unless an earlier run is scheduled."""
        if deadline is None or deadline >= min(self._wakes_at, LATEST_TICK):
            return
        self._wakes_at = deadline

        def wake() -> None:
            if self._wakes_at == deadline:
                self._wakes_at = LATEST_TICK
                self._run()

        # The clock's whole milliseconds reach the deadline just after it.
        self._loop.at((deadline + 0.5) / 1000, wake)
