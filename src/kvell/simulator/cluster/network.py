"""Messages and reads of pages between instances, in virtual time.

Messages and pages use different links between two instances, as between processes. An endpoint is
one incarnation: a message for a dead one is not delivered.

A pull ends once and in one of three ways: all bytes have arrived, it is stopped, or its source
cannot be reached. Whether it counts is decided when it ends, by the right to read.

Pages have no layers here: a real pull in stages transfers a part of every page, this one transfers
some whole pages, as many bytes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

import msgspec

from kvell.memory import Ints
from kvell.mempool.entries import Heard, PeerEntry, PeerLost, PullEnded
from kvell.mempool.transfers.actions import Pull
from kvell.mempool.transfers.messages import PeerMessage, Transfer, Written
from kvell.simulator.clock.links import Link
from kvell.simulator.clock.transport import VirtualTransport
from kvell.simulator.cluster.device import Device
from kvell.simulator.cluster.loop import Loop
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


class Endpoint(Protocol):
    """One incarnation of an instance."""

    @property
    def name(self) -> str:
        """The instance's name."""
        ...

    @property
    def incarnation(self) -> int:
        """The number of this start; unique among all incarnations."""
        ...

    @property
    def device(self) -> Device:
        """The endpoint's pages."""
        ...

    @property
    def rights(self) -> Collection[int]:
        """The numbers of its transfers whose receivers may read now."""
        ...

    def hear(self, entry: PeerEntry) -> None:
        """Handle an event, between two steps."""
        ...

    def meet(self, other: Self, *, is_near: bool) -> None:
        """Connect to another instance, before any message to or from it.

        :param is_near: whether it is on the same host.
        """
        ...

    def answer(self, seconds: float) -> float | None:
        """Compute attention over lent pages for another instance.

        :returns: the time until it has ended; None if the instance stands still.
        """
        ...


@dataclass(eq=False)
class _Copy:
    """A pull under way.

    :ivar stages: in which its rows are written; 0: all are.
    :ivar num_asked: number of its rows that are requested or have arrived.
    :ivar crossing: rows that are read when their bytes arrive, by the payload they arrive with.
    :ivar is_last: whether all rows are requested.
    """

    reader: Endpoint
    source: Endpoint
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
        self._alive: dict[str, Endpoint] = {}
        self._cut: set[frozenset[str]] = set()
        self._copies: dict[bytes, _Copy] = {}
        self._crossing: dict[bytes, bytes] = {}
        """The pull whose bytes arrive with a payload."""
        self._written: dict[bytes, int] = {}
        """Stages of pulls that are reported as written, also of pulls that have not begun."""
        self.pulled_bytes: dict[str, int] = {}
        """Requested bytes, by the instance that reads."""

    def enter(self, endpoint: Endpoint) -> None:
        for other in self._alive.values():
            for source, reader in ((endpoint, other), (other, endpoint)):
                self._transport.set_link(_pages(source), _pages(reader), self._links.pages)
        self._alive[endpoint.name] = endpoint
        for pair in self._cut:
            self._cut_ways(pair)

    def leave(self, endpoint: Endpoint) -> None:
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

    def send(self, sender: Endpoint, target: str, message: PeerMessage) -> None:
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

    def pull(self, reader: Endpoint, action: Pull) -> None:
        transfer, rows = action.transfer, action.rows
        source = self._alive.get(transfer.sender)
        is_there = source is not None and source.incarnation == transfer.incarnation
        if source is None or not is_there:
            self._tell(reader, PullEnded(transfer, UNREACHED), self._links.hang_up_seconds)
            return
        key = _key(reader, transfer)
        copy = self._copies[key] = _Copy(reader, source, transfer, rows, action.stages)
        if action.stages:
            self._bring_written(copy, self._written.get(key, -1))
        else:
            self._bring_rest(copy)
        if self._is_cut(reader.name, source.name):
            self._break(key, self._links.unreached_seconds)

    def rest(self, reader: Endpoint, transfer: Transfer) -> None:
        copy = self._copies.get(_key(reader, transfer))
        if copy is not None:
            self._bring_rest(copy)

    def stop(self, reader: Endpoint, transfer: Transfer) -> None:
        """End a pull soon; the read in progress is still written."""
        key = _key(reader, transfer)
        self._loop.after(self._links.stop_seconds, lambda: self._end(key, STOPPED))

    def find(self, name: str, incarnation: int) -> Endpoint | None:
        endpoint = self._alive.get(name)
        return endpoint if endpoint is not None and endpoint.incarnation == incarnation else None

    def ask(self, debtor: Endpoint, creditor: Endpoint, seconds: float) -> float | None:
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

    def _heard(self, target: Endpoint, sender: str, message: PeerMessage) -> None:
        """Handle a message; a hint for pulls takes effect immediately, not between two steps."""
        if not isinstance(message, Written):
            target.hear(Heard(sender, message))
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

        def told() -> None:
            if self._is_cut(name, lost):
                self._met.discard((_address(me), _address(other)))
                me.hear(entry)

        self._loop.after(self._links.unreached_seconds, told)

    def _give_up(self, sender: Endpoint, target: str) -> None:
        if self._is_cut(sender.name, target):
            sender.hear(PeerLost(target, 0))

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
        return sum(self._page_bytes[group] for group in rows[:, 0].tolist())

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
        copy.reader.hear(PullEnded(copy.transfer, problem))

    def _tell(self, endpoint: Endpoint, entry: PeerEntry, seconds: float) -> None:
        self._loop.after(seconds, lambda: endpoint.hear(entry))

    def _meet(self, endpoint: Endpoint, other: Endpoint) -> None:
        pair = _address(endpoint), _address(other)
        if self._hosts is None or pair in self._met:
            return
        self._met.add(pair)
        is_near = self._hosts.get(endpoint.name, "") == self._hosts.get(other.name, "")
        endpoint.meet(other, is_near=is_near)

    def _lose(self, endpoint: Endpoint, lost: PeerLost, seconds: float) -> None:
        def see() -> None:
            self._met.discard((_address(endpoint), f"{lost.peer}#{lost.incarnation}"))
            endpoint.hear(lost)

        self._loop.after(seconds, see)


def _address(endpoint: Endpoint) -> str:
    return f"{endpoint.name}#{endpoint.incarnation}"


def _key(reader: Endpoint, transfer: Transfer) -> bytes:
    return _ENCODER.encode((reader.name, reader.incarnation, transfer))


def _pages(endpoint: Endpoint) -> str:
    return f"{_address(endpoint)}/pages"
