"""Pools of other instances after an instance's own pool, as its process would map them."""

from collections import deque

from kvell.engine.requests.plan import BorrowedPages
from kvell.errors import TryLater
from kvell.mempool.entries import NOT_IN_PLACE
from kvell.mempool.transports.places import MappingSlots, num_places
from kvell.simulator.cluster.device import Device
from kvell.simulator.cluster.network import Endpoint


class PeerMappings:
    """The mapped pools of other instances, and the check of rights to read them.

    An incarnation may be mapped again before its loss is handled. Both of its mappings then exist
    for a while, and the older one is read.

    :param device: of the instance.
    :param pool_bytes: of its pool, and of all others.
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
                self._device.take_away(first)
        if not self._losses[key]:
            del self._losses[key]
        if not self._mapped.get(key):
            self._mapped.pop(key, None)

    def stands(self, pages: BorrowedPages) -> bool:
        """Return whether the creditor still lets this instance read pages."""
        mapped = self._mapped.get((pages.instance, pages.incarnation))
        return mapped is not None and pages.right in mapped[0][1].rights
