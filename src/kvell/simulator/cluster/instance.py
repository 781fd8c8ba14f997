"""Instances in virtual time, and the network between them.

An incarnation has the engine's core and agent, and does their actions.

::

    inbox ──► EngineLoop ──► actions ──► Network
                  │   ▲ └─────► events ───► the front
             plan ▼   │ commit, after the step's seconds
                  Device

As in an instance's process, inputs that arrive during a step are handled after it, and the right to
read a page changes before the next step is planned. When the front answers a step's events, the
next one has begun; an instance that is alone, as in a library, begins it after these answers.

Messages and pages use different links between two instances, as between processes. A message for a
dead incarnation is not delivered.

A pull ends once and in one of three ways: all bytes have arrived, it is stopped, or its source
cannot be reached. Whether it counts is decided when it ends, by the right to read.

Pages have no layers here: a real pull in stages transfers a part of every page, this one transfers
some whole pages, as many bytes.

A step that *asks* sends its query rows to the creditors, computes attention over its own pages, and
waits for what the creditors have not answered by then.  A creditor answers one query after another,
and its own step takes longer by the time of its answers (Infinite-LLM §4, equation 6).
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
from msgspec import structs
from typing_extensions import override

from kvell.cost.prices import ExecCosts
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
from kvell.engine.running.lent.queries import PATIENCE_SECONDS
from kvell.errors import TryLater
from kvell.memory import Ints
from kvell.mempool.agent import Agent
from kvell.mempool.entries import (
    BY_QUERIES,
    NOT_IN_PLACE,
    Heard,
    PeerEntry,
    PeerLost,
    PeerMapped,
    PullEnded,
)
from kvell.mempool.loans.creditor_ledger import CreditorLedger
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
from kvell.mempool.transfers.messages import Offer, PeerMessage, Prepared, Transfer, Written
from kvell.mempool.transfers.receiving import owner_of
from kvell.mempool.transports.neighbours import MappingSlots, num_places
from kvell.pages.rows import PulledPageRow
from kvell.simulator.clock.links import Link
from kvell.simulator.clock.transport import VirtualTransport
from kvell.simulator.cluster.device import Device
from kvell.simulator.cluster.loop import Loop
from kvell.simulator.cluster.meter import InstanceMeter
from kvell.simulator.replay.runner import StepTimer
from kvell.wire.decoding import decode

MESSAGE_SECONDS = 1e-4
"""Latency between two processes of one host, including the wake-up of the receiver."""
UNREACHED = "its pages cannot be reached"
REVOKED = "the right to read was revoked"
STOPPED = "it was stopped"

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(PeerMessage)


@dataclass(frozen=True)
class Links:
    """The connections between instances, in each direction.

    :param pages: without loss: a read arrives, or the reader is notified.
    :param hang_up_seconds: until others see that an instance has died.
    :param unreached_seconds: until others see that one cannot be reached.
    :param stop_seconds: until a pull that is stopped writes no more.
    """

    pages: Link
    messages: Link = field(default_factory=lambda: Link(MESSAGE_SECONDS))
    hang_up_seconds: float = MESSAGE_SECONDS
    unreached_seconds: float = 5.0
    stop_seconds: float = 1e-3


@dataclass(eq=False)
class _Copy:
    """A pull under way.

    :ivar stages: in which its rows are written; 0: all are.
    :ivar num_asked: number of its rows that are requested or have arrived.
    :ivar crossing: rows that are read when their bytes arrive, by the payload they arrive with.
    :ivar is_last: whether all rows are requested.
    """

    reader: "VirtualInstance"
    source: "VirtualInstance"
    transfer: Transfer
    rows: Ints
    stages: int
    num_asked: int = 0
    crossing: dict[bytes, Ints] = field(default_factory=dict)
    is_last: bool = False

    def take(self, until: int) -> Ints:
        taken = self.rows[self.num_asked : until]
        self.num_asked = max(self.num_asked, until)
        return taken


class Network:
    """All live instances, and the messages and pages in transit.

    :param hosts: hosts of instances that are not on the common host, by name; None: no pool can be
        read in place on any host, and instances receive no notice of connections.
    """

    def __init__(
        self,
        loop: Loop,
        transport: VirtualTransport,
        links: Links,
        page_bytes: list[int],
        hosts: Mapping[str, str] | None = None,
    ) -> None:
        self._loop, self._transport, self._links = loop, transport, links
        self._hosts = hosts
        self._met: set[tuple[str, str]] = set()
        """Connected pairs of addresses."""
        self._page_bytes = page_bytes
        self._alive: dict[str, VirtualInstance] = {}
        self._cut: set[frozenset[str]] = set()
        self._copies: dict[bytes, _Copy] = {}
        self._crossing: dict[bytes, bytes] = {}
        """The pull whose bytes arrive with a payload."""
        self._written: dict[bytes, int] = {}
        """Stages of pulls that are reported as written, also of pulls that have not begun."""
        self.pulled_bytes: dict[str, int] = {}
        """Requested bytes, by the instance that reads."""

    def enter(self, endpoint: "VirtualInstance") -> None:
        for other in self._alive.values():
            for source, reader in ((endpoint, other), (other, endpoint)):
                self._transport.set_link(_pages(source), _pages(reader), self._links.pages)
        self._alive[endpoint.name] = endpoint
        for pair in self._cut:
            self._cut_ways(pair)

    def leave(self, endpoint: "VirtualInstance") -> None:
        """Remove a dead instance; the others see its death soon."""
        del self._alive[endpoint.name]
        for key, copy in list(self._copies.items()):
            if copy.reader is endpoint:
                self._forget(key)
            elif copy.source is endpoint:
                self._break(key, self._links.hang_up_seconds)
        lost = PeerLost(endpoint.name, endpoint.incarnation)
        for other in self._alive.values():
            for way in ((endpoint, other), (other, endpoint)):
                self._transport.cut(*map(_address, way))
            self._lose(other, lost, self._links.hang_up_seconds)

    def send(self, sender: "VirtualInstance", target: str, message: PeerMessage) -> None:
        """Send a message; report an unreachable receiver to the sender."""
        other = self._alive.get(target)
        if other is None:
            self._lose(sender, PeerLost(target, 0), self._links.hang_up_seconds)
            return
        body = _ENCODER.encode(message)
        self._transport.send(_address(sender), _address(other), body, self._loop.now_seconds)
        if self._is_cut(sender.name, target):
            self._loop.after(self._links.unreached_seconds, lambda: self._give_up(sender, target))
        else:
            self._meet(sender, other)

    def pull(self, reader: "VirtualInstance", action: Pull) -> None:
        transfer, rows = action.transfer, action.rows
        source = self._alive.get(transfer.sender)
        if source is None or source.incarnation != transfer.incarnation:
            ended = PullEnded(transfer, UNREACHED)
            self._loop.after(self._links.hang_up_seconds, partial(reader.on_peer_entry, ended))
            return
        key = _key(reader, transfer)
        copy = self._copies[key] = _Copy(reader, source, transfer, rows, action.stages)
        if action.stages:
            self._bring_written(copy, self._written.get(key, -1))
        else:
            self._bring_rest(copy)
        if self._is_cut(reader.name, source.name):
            self._break(key, self._links.unreached_seconds)

    def rest(self, reader: "VirtualInstance", transfer: Transfer) -> None:
        copy = self._copies.get(_key(reader, transfer))
        if copy is not None:
            self._bring_rest(copy)

    def stop(self, reader: "VirtualInstance", transfer: Transfer) -> None:
        """End a pull soon; the read in progress is still written."""
        key = _key(reader, transfer)
        self._loop.after(self._links.stop_seconds, lambda: self._end(key, STOPPED))

    def find(self, name: str, incarnation: int) -> "VirtualInstance | None":
        endpoint = self._alive.get(name)
        return endpoint if endpoint is not None and endpoint.incarnation == incarnation else None

    def ask(
        self, debtor: "VirtualInstance", creditor: "VirtualInstance", seconds: float
    ) -> float | None:
        """Let a creditor compute attention; return the time until it answers, None if it cannot."""
        is_cut = self._is_cut(debtor.name, creditor.name)
        return None if is_cut else creditor.answer(seconds)

    def deliver(self) -> bool:
        """Hand over all arrived messages and pages; return whether there were any."""
        arrived = self._transport.due(self._loop.now_seconds)
        for delivery in arrived:
            if delivery.payload in self._crossing:
                self._crossed(delivery.payload)
                continue
            for target in self._alive.values():
                if _address(target) == delivery.receiver:
                    sender = delivery.sender.rpartition("#")[0]
                    message = decode(_DECODER, delivery.payload)
                    self._meet(target, self._alive[sender])  # a dead sender's messages are cut
                    self._heard(target, sender, message)
        return bool(arrived)

    def _heard(self, target: "VirtualInstance", sender: str, message: PeerMessage) -> None:
        """Handle a message; a hint for pulls takes effect immediately, not between two steps."""
        if not isinstance(message, Written):
            target.on_peer_entry(Heard(sender, message))
        elif message.transfer.sender == sender:
            key = _key(target, message.transfer)
            stage = self._written[key] = max(message.stage, self._written.get(key, -1))
            if key in self._copies:
                self._bring_written(self._copies[key], stage)

    # ---------------------------------------------------------------------- cuts

    def partition(self, side: Collection[str], other: Collection[str]) -> None:
        """Cut one side off from the other until :meth:`heal`; both see it after a while."""
        pairs = {frozenset((a, b)) for a in side for b in other if a != b} - self._cut
        self._cut |= pairs
        for pair in sorted(pairs, key=sorted):
            self._cut_ways(pair)
            a, b = sorted(pair)
            for key, copy in self._copies.items():
                if {copy.reader.name, copy.source.name} == pair:
                    self._break(key, self._links.unreached_seconds)
            for name, another in ((a, b), (b, a)):
                self._notice(name, another)

    def heal(self) -> None:
        self._cut.clear()
        self._transport.heal()

    def _notice(self, name: str, lost: str) -> None:
        """Let an instance see after a while that another one does not answer."""
        me, other = self._alive.get(name), self._alive.get(lost)
        if me is None or other is None:
            return
        entry = PeerLost(lost, other.incarnation)

        def lose_peer() -> None:
            if self._is_cut(name, lost):
                self._met.discard((_address(me), _address(other)))
                me.on_peer_entry(entry)

        self._loop.after(self._links.unreached_seconds, lose_peer)

    def _give_up(self, sender: "VirtualInstance", target: str) -> None:
        if self._is_cut(sender.name, target):
            sender.on_peer_entry(PeerLost(target, 0))

    def _is_cut(self, name: str, other: str) -> bool:
        return frozenset((name, other)) in self._cut

    def _cut_ways(self, pair: frozenset[str]) -> None:
        ends = [self._alive[name] for name in pair if name in self._alive]
        if len(ends) == 2:
            for spell in (_address, _pages):
                end, other = map(spell, ends)
                self._transport.partition([end], [other])

    # --------------------------------------------------------------------- copies

    def _bring_written(self, copy: _Copy, stage: int) -> None:
        """Request the written rows; do nothing if they or all rows are requested."""
        if copy.stages and not copy.is_last:
            rows = copy.take(len(copy.rows) * min(stage + 1, copy.stages) // copy.stages)
            self._ask(copy, rows) if len(rows) else None

    def _bring_rest(self, copy: _Copy) -> None:
        if copy.is_last:
            return
        copy.is_last = True
        rows = copy.take(len(copy.rows))
        early = len(rows) // 2
        copy.reader.device.read(copy.source.device, rows[:early])
        self._ask(copy, rows[early:], self._bytes_of(rows[:early]))

    def _ask(self, copy: _Copy, rows: Ints, more_bytes: int = 0) -> None:
        size_bytes = self._bytes_of(rows) + more_bytes
        reader, source = copy.reader, copy.source
        key = _key(reader, copy.transfer)
        payload = _ENCODER.encode((key, copy.num_asked, copy.is_last))
        copy.crossing[payload], self._crossing[payload] = rows, key
        self.pulled_bytes[reader.name] = self.pulled_bytes.get(reader.name, 0) + size_bytes
        way = _pages(source), _pages(reader)
        self._transport.send(*way, payload, self._loop.now_seconds, size_bytes=size_bytes)

    def _bytes_of(self, rows: Ints) -> int:
        return sum(self._page_bytes[group] for group in rows[:, PulledPageRow.GROUP].tolist())

    def _crossed(self, payload: bytes) -> None:
        key = self._crossing.pop(payload)
        copy = self._copies[key]
        copy.reader.device.read(copy.source.device, copy.crossing.pop(payload))
        if copy.is_last and not copy.crossing:
            self._end(key, "")

    def _forget(self, key: bytes) -> _Copy | None:
        copy = self._copies.pop(key, None)
        for payload in () if copy is None else copy.crossing:
            del self._crossing[payload]
        return copy

    def _break(self, key: bytes, seconds: float) -> None:
        """End a pull after a while: its pages cannot be reached any more."""
        self._loop.after(seconds, lambda: self._end(key, UNREACHED))

    def _end(self, key: bytes, problem: str) -> None:
        copy = self._forget(key)
        if copy is None:
            return
        for rows in copy.crossing.values() if problem != UNREACHED else ():
            copy.reader.device.read(copy.source.device, rows)
        if not problem and copy.transfer.number not in copy.source.rights:
            problem = REVOKED
        copy.reader.on_peer_entry(PullEnded(copy.transfer, problem))

    def _meet(self, endpoint: "VirtualInstance", other: "VirtualInstance") -> None:
        pair = _address(endpoint), _address(other)
        if self._hosts is None or pair in self._met:
            return
        self._met.add(pair)
        is_near = self._hosts.get(endpoint.name, "") == self._hosts.get(other.name, "")
        endpoint.connect_peer(other, is_near=is_near)

    def _lose(self, endpoint: "VirtualInstance", lost: PeerLost, seconds: float) -> None:
        def see() -> None:
            self._met.discard((_address(endpoint), f"{lost.peer}#{lost.incarnation}"))
            endpoint.on_peer_entry(lost)

        self._loop.after(seconds, see)


def _address(endpoint: "VirtualInstance") -> str:
    return f"{endpoint.name}#{endpoint.incarnation}"


def _key(reader: "VirtualInstance", transfer: Transfer) -> bytes:
    return _ENCODER.encode((reader.name, reader.incarnation, transfer))


def _pages(endpoint: "VirtualInstance") -> str:
    return f"{_address(endpoint)}/pages"


@dataclass(frozen=True)
class NeighbourReads:
    """Seconds on top of those of steps whose pages are all local, if they are read in place.

    :param section_seconds: added to a step for each section that it reads at another instance.
    :param lent_seconds: the same for each section that the instance lends.
    :param copied_seconds: added to a step for each section whose copy to or from the instance has
        ended since the last one, as far as the computation does not hide copies (figure 12).
    """

    section_seconds: float = 0.0
    lent_seconds: float = 0.0
    copied_seconds: float = 0.0

    def seconds(self, plan: StepPlan, lending: CreditorLedger) -> float:
        if not (plan.borrowed or lending.lends):
            return 0.0
        in_place = sum(not pages.by_queries for pages in plan.borrowed)
        return in_place * self.section_seconds + len(lending) * self.lent_seconds


IN_ONE_MEMORY = NeighbourReads()
"""All instances share one memory, so that the cost of a page is the same at each."""


@dataclass(frozen=True)
class AskingStep:
    """A step that may ask creditors.

    :param missed: handles of rows that lack an answer, so that they do not count.
    """

    seconds: float
    missed: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PricedSteps:
    """The duration of steps, with their queries to creditors.

    :param machine: times steps whose pages are all local.
    :param costs: prices of the model, as the instances report them.
    :param asks: whether instances of other hosts are asked for attention over what they lend.
    """

    machine: StepTimer
    costs: ExecCosts
    network: Network
    asks: bool

    def begin(self, debtor: "VirtualInstance", plan: StepPlan) -> AskingStep:
        if not plan.away:
            return AskingStep(self.machine.step_seconds(plan))
        away = dict(plan.away)
        own = [
            structs.replace(work, start=work.start - away.get(work.handle, 0)) for work in plan.work
        ]
        local_seconds = self.machine.step_seconds(replace(plan, work=tuple(own)))
        attended = sum(self._attention(work.start + work.count, work.count) for work in own)
        wait_seconds, missed = self._ask(debtor, plan, away)
        return AskingStep(local_seconds + max(0.0, wait_seconds - attended), missed)

    def _ask(
        self, debtor: "VirtualInstance", plan: StepPlan, away: dict[int, int]
    ) -> tuple[float, frozenset[int]]:
        """Return the time until all have answered or none is waited for, and the missed handles."""
        rows = {work.handle: work.count for work in plan.work}
        remote = [pages for pages in plan.borrowed if pages.by_queries]
        sections = Counter(pages.handle for pages in remote)
        seconds: dict[VirtualInstance, float] = defaultdict(float)
        handles: dict[VirtualInstance, set[int]] = defaultdict(set)
        missed = set[int]()
        for pages in remote:
            creditor = self.network.find(pages.instance, pages.incarnation)
            if creditor is None or pages.right not in creditor.rights:
                missed.add(pages.handle)
                continue
            size = away[pages.handle] / sections[pages.handle]
            seconds[creditor] += self._attention(size, rows[pages.handle])
            handles[creditor].add(pages.handle)
        waits = {
            creditor: self.network.ask(debtor, creditor, work_seconds)
            for creditor, work_seconds in seconds.items()
        }
        silent = [creditor for creditor, wait in waits.items() if wait is None]
        missed.update(*(handles[creditor] for creditor in silent))
        longest = max((wait for wait in waits.values() if wait is not None), default=0.0)
        longest = PATIENCE_SECONDS if silent else longest
        sent = sum(rows[handle] for handle in away)
        wait = self.costs.asked_step_seconds + sent * self.costs.asked_row_seconds + longest
        return wait, frozenset(missed)

    def _attention(self, tokens: float, rows: int) -> float:
        return tokens * max(self.costs.held_token_seconds, rows * self.costs.pair_seconds)


class PeerMappings:
    """The mapped pools of other instances, and the check of rights to read them.

    An incarnation may be mapped again before its loss is handled. Both of its mappings then exist
    for a while, and the older one is read.
    """

    def __init__(self, device: Device, pool_bytes: int, large_page_bytes: int) -> None:
        self._device, self._pool_bytes = device, pool_bytes
        count = num_places(pool_bytes, large_page_bytes)
        self._places = MappingSlots(pool_bytes, large_page_bytes, count)
        self._mapped: dict[tuple[str, int], deque[tuple[int, VirtualInstance]]] = {}
        self._losses: dict[tuple[str, int], deque[int]] = {}
        """Numbers of mappings that end with each loss that is not handled yet."""

    def __len__(self) -> int:
        return sum(map(len, self._mapped.values()))

    def put(self, other: "VirtualInstance") -> int:
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
        self.watch: Callable[[], None] = lambda: None
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

    def on_peer_entry(self, entry: PeerEntry) -> None:
        if isinstance(entry, PeerLost):
            self.behind.lose(entry.peer, entry.incarnation)
        self.take(entry)

    def connect_peer(self, other: "VirtualInstance", *, is_near: bool) -> None:
        far = BY_QUERIES if self._steps.asks else NOT_IN_PLACE
        first = self.behind.put(other) if is_near else far
        self._inbox.append(PeerMapped(other.name, other.incarnation, first))

    def answer(self, seconds: float) -> float | None:
        """Compute attention over lent pages for another instance, after earlier queries.

        :returns: the time until it has ended; None while this instance is paused.
        """
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
            watch = partial(IndexWatch, self.agent.core, with_tokens=False)
            return events + self.core.watch_index(watch)
        if isinstance(entry, PeerLost):  # between two steps: no step reads its pool
            self.behind.take_away(entry.peer, entry.incarnation)
        return events + self._engine.take(entry)

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
                hold = self.agent.holds.get(owner_of(action.message.transfer))
                if hold is not None:
                    self.counts.arriving_tokens += len(hold.tokens)
                    self.counts.arriving_hits += hold.hit_tokens
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
