"""A network in virtual time, with latency, bandwidth limits, loss and cuts.

::

    send ──► on a cut link? ──► queue of the link ──► lost? ──► latency + jitter ──► due
                 │ yes           (bandwidth)            │ yes        │ cut meanwhile?
                 └────────────────────► lost ◄──────────┴────────────┘

Messages are bytes between named endpoints; a link is a direction between two of them. The fate of a
message is decided when it is sent, by a keyed hash of the seed, the link and the message's number
on it: traffic on one link never changes the fate of messages on another, and the same sends give
the same deliveries. The caller passes the virtual time; nothing here reads a clock. A message that
is never delivered causes no notification: deadlines belong to the sender.

>>> network = VirtualTransport(Link(latency_seconds=0.5))
>>> network.send("a", "b", b"ping", now_seconds=1.0)
>>> network.next_seconds()
1.5
>>> [(each.receiver, each.payload) for each in network.due(1.5)]
[('b', b'ping')]
"""

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace

from kvell.simulator.clock.events import EventQueue
from kvell.simulator.clock.links import Delivery, Link, LinkStats

DRAW_BITS = 53
"""Bits that a float holds exactly, so that no draw rounds up to 1."""


Payload = bytes | bytearray | memoryview


_COUNTS = tuple(counted.name for counted in fields(LinkStats))


@dataclass
class _LinkState:
    link: Link
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    free_seconds: float = -math.inf
    last_due_seconds: float = -math.inf
    is_cut: bool = False
    cuts: int = 0


_Flight = tuple[_LinkState, int, Delivery]
"""The link, how often it had been cut at sending, and the delivery."""


class VirtualTransport(EventQueue[_Flight]):
    """All links between all endpoints; endpoints exist as soon as they are named.

    ``next_seconds`` is when the next delivery is due, unless a cut prevents it.

    :param link: properties of every link until :meth:`set_link` changes them.
    :param seed: decides every loss, copy and delay.
    """

    def __init__(self, link: Link | None = None, seed: int = 0) -> None:
        super().__init__()
        self._default = link or Link()
        self._seed = seed
        self._links: dict[tuple[str, str], _LinkState] = {}
        self._now_seconds = -math.inf

    # ------------------------------------------------------------------ messages

    def send(
        self,
        sender: str,
        receiver: str,
        payload: Payload,
        now_seconds: float,
        *,
        size_bytes: int | None = None,
    ) -> None:
        """Hand a message to the network, which keeps a copy; it may never arrive.

        :param size_bytes: size of the message on the link, if its payload only stands for content.
        :raises ValueError: if time runs backwards.
        """
        self._move_to(now_seconds)
        state = self._state(sender, receiver)
        message = bytes(memoryview(payload))
        size_bytes = len(message) if size_bytes is None else size_bytes
        number = state.counts["sent"]
        state.counts["sent"] += 1
        state.counts["sent_bytes"] += size_bytes
        if state.is_cut:
            state.counts["cut"] += 1
            return
        begin_seconds = max(now_seconds, state.free_seconds)
        state.free_seconds = begin_seconds + size_bytes / state.link.bandwidth_bytes
        if self._draw(sender, receiver, number, "loss") < state.link.loss:
            state.counts["lost"] += 1
            return
        free_seconds = state.free_seconds
        delivery = Delivery(
            sender, receiver, message, number, now_seconds, free_seconds, size_bytes
        )
        self._schedule(state, delivery, "first")
        if self._draw(sender, receiver, number, "duplication") < state.link.duplication:
            state.counts["duplicated"] += 1
            self._schedule(state, delivery, "second")

    def due(self, now_seconds: float) -> list[Delivery]:
        """Take the deliveries that have arrived by now, in order of arrival.

        :raises ValueError: if time runs backwards.
        """
        self._move_to(now_seconds)
        arrived: list[Delivery] = []
        while (at_seconds := self.next_seconds()) is not None:
            if at_seconds > now_seconds:
                break
            arrived += self._land(*self.pop())
        return arrived

    # --------------------------------------------------------------------- links

    def set_link(self, sender: str, receiver: str, link: Link) -> None:
        """Replace one direction; messages in flight arrive as before."""
        self._state(sender, receiver).link = link

    def cut(self, sender: str, receiver: str) -> None:
        state = self._state(sender, receiver)
        state.is_cut = True
        state.cuts = state.cuts + 1

    def partition(self, side: Collection[str], other: Collection[str]) -> None:
        for name in side:
            for another in other:
                self.cut(name, another)
                self.cut(another, name)

    def heal(self) -> None:
        for state in self._links.values():
            state.is_cut = False

    def stats(self, sender: str, receiver: str) -> LinkStats:
        return LinkStats(**self._state(sender, receiver).counts)

    def total(self) -> LinkStats:
        counts = [state.counts for state in self._links.values()]
        return LinkStats(**{name: sum(each[name] for each in counts) for name in _COUNTS})

    # -------------------------------------------------------------------- inside

    def _schedule(self, state: _LinkState, delivery: Delivery, copy: str) -> None:
        """Schedule a copy whose last byte is on the wire at ``delivery.due_seconds``."""
        link = state.link
        late = self._draw(delivery.sender, delivery.receiver, delivery.number, copy)
        due_seconds = delivery.due_seconds + link.latency_seconds + late * link.jitter_seconds
        if not link.jitter_seconds:
            due_seconds = max(due_seconds, state.last_due_seconds)
        state.last_due_seconds = max(due_seconds, state.last_due_seconds)
        state.counts["in_flight"] += 1
        arriving = replace(delivery, due_seconds=due_seconds)
        self.schedule(due_seconds, (state, state.cuts, arriving))

    def _land(self, state: _LinkState, cuts: int, delivery: Delivery) -> list[Delivery]:
        state.counts["in_flight"] -= 1
        if state.cuts != cuts:
            state.counts["cut"] += 1
            return []
        state.counts["delivered"] += 1
        state.counts["delivered_bytes"] += delivery.size_bytes
        return [delivery]

    def _state(self, sender: str, receiver: str) -> _LinkState:
        return self._links.setdefault((sender, receiver), _LinkState(self._default))

    def _move_to(self, now_seconds: float) -> None:
        if not self._now_seconds <= now_seconds < math.inf:
            raise ValueError(f"it is {self._now_seconds} s already, not {now_seconds} s")
        self._now_seconds = now_seconds

    def _draw(self, sender: str, receiver: str, number: int, what: str) -> float:
        """Return a number in [0, 1), uniform, the same for the same arguments."""
        key = repr((self._seed, sender, receiver, number, what)).encode()
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return (int.from_bytes(digest) >> (64 - DRAW_BITS)) / (1 << DRAW_BITS)
