"""Debtors and creditors of one plan, and the order in which creditors are asked."""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvell.cluster.steering.lending.model import PerformanceModel, ThroughputInputs
from kvell.cluster.steering.placements import Reading, reading_of, ways_to_share
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.vocabulary import RequestId


@dataclass
class Debtor:
    """An instance that may borrow in one plan.

    :ivar blocks: sections that may leave it in this plan.
    :ivar reading: how steps read the requests that have remote sections already: all sections of a
        request are read in the same way.
    """

    instance_id: str
    facts: InstanceFacts
    model: PerformanceModel
    load: ThroughputInputs
    longest: Sequence[RequestPlacementEntry]
    blocks: int
    reading: Mapping[str, Reading] = field(default_factory=dict)


@dataclass
class Creditor:
    """An instance that may lend in one plan.

    :ivar room: sections that it has memory for.
    :ivar spared: sections after which its utilisation is above the threshold, so that it lends no
        more.
    :ivar blocks: sections that may arrive in this plan.
    """

    instance_id: str
    facts: InstanceFacts
    model: PerformanceModel
    load: ThroughputInputs
    room: int
    spared: int
    blocks: int

    @property
    def rank(self) -> tuple[int, str]:
        return -self.room, self.instance_id

    @property
    def can_lend(self) -> bool:
        """Whether a section may be lent in this plan."""
        return min(self.room, self.spared, self.blocks) > 0


class OfferedSections:
    """The sections of one debtor's requests that may be read in one way, the longest first."""

    def __init__(self, debtor: Debtor, reading: Reading, left: dict[RequestId, int]) -> None:
        self._left = left
        self._names = [
            entry.req_id
            for entry in sorted(debtor.longest, key=lambda entry: (-entry.num_blocks, entry.req_id))
            if debtor.reading.get(entry.req_id, reading) == reading
        ]

    def __len__(self) -> int:
        return sum(self._left[name] for name in self._names)

    def take(self, count: int) -> Iterator[tuple[RequestId, int]]:
        """Take ``count`` sections, of one request after the other."""
        for name in self._names:
            taken = min(count, self._left[name])
            self._left[name] -= taken
            count -= taken
            if taken:
                yield name, taken


class Market:
    """The creditors of a plan, by how a debtor would read what they lend.

    A creditor's memory only falls, so an entry of a heap may be out of date: then it is put back in
    its place when it surfaces.
    """

    def __init__(self, creditors: Iterable[Creditor]) -> None:
        self._heaps: dict[tuple[Reading, tuple[str, int]], list[tuple[int, str, Creditor]]] = {}
        for creditor in creditors:
            if creditor.can_lend:
                for way in ways_to_share(creditor.facts).items():
                    self._heaps.setdefault(way, []).append((*creditor.rank, creditor))
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def next_for(self, debtor: Debtor, reading: Reading) -> Creditor | None:
        """Take the creditor with the most memory that a debtor reads in a way.

        An instance that answers queries is still read in place by those of its host.
        """
        heap = self._heap(debtor, reading)
        read_otherwise: list[Creditor] = []
        taken = None
        while heap and taken is None:
            room, _, creditor = heapq.heappop(heap)
            if creditor.can_lend and room != -creditor.room:
                heapq.heappush(heap, (*creditor.rank, creditor))
            elif creditor.can_lend and reading_of(debtor.facts, creditor.facts) == reading:
                taken = creditor
            elif creditor.can_lend:
                read_otherwise.append(creditor)
        self.put_back(read_otherwise, reading)
        return taken

    def put_back(self, creditors: Iterable[Creditor], reading: Reading) -> None:
        for creditor in creditors:
            if creditor.can_lend:
                heapq.heappush(self._heap(creditor, reading), (*creditor.rank, creditor))

    def _heap(self, party: Debtor | Creditor, reading: Reading) -> list[tuple[int, str, Creditor]]:
        place = ways_to_share(party.facts).get(reading)
        return [] if place is None else self._heaps.get((reading, place), [])
