"""Algorithm 1: which sections go where, so that all instances together make most tokens.

::

    short instances of a small batch, smallest first ──► debtor ┐
    its longest requests, longest first ────────────► request   ├─► k sections, by equation 7
    instances of its host, most memory first ───────► creditor  ┘   until there is no gain

Source: Infinite-LLM §5.3, Algorithm 1.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvell.cluster.steering.lending.model import Load, PerformanceModel
from kvell.cluster.steering.placements import Reach
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.vocabulary import RequestId


@dataclass
class Debtor:
    """An instance that may borrow, and takes part in one plan.

    :ivar load: with what it has been planned to borrow.
    :ivar blocks: sections that may go from it in this plan.
    """

    instance_id: str
    reach: Reach
    load: Load
    longest: Sequence[RequestPlacementEntry]
    blocks: int


@dataclass
class Creditor:
    """An instance that may lend, and takes part in one plan.

    :ivar load: with what it has been planned to lend.
    :ivar room: sections for which it has memory.
    :ivar spared: of these, those behind which its utilisation is above the threshold, so that it
        is asked for no others.
    :ivar blocks: sections that may come to it in this plan.
    """

    instance_id: str
    reach: Reach
    load: Load
    room: int
    spared: int
    blocks: int

    @property
    def rank(self) -> tuple[int, str]:
        """Its place among creditors, the one with most available memory first."""
        return -self.room, self.instance_id


@dataclass(frozen=True, slots=True)
class SectionMove:
    """The paper's ``move_kvcache(req_id, num_blocks, dst_inst)``."""

    req_id: RequestId
    source: str
    target: str
    num_blocks: int


Places = dict[tuple[str, int], list[tuple[int, str, Creditor]]]
"""Heaps of creditors, by their host and the size of their sections."""


def planned(
    debtors: Iterable[Debtor], creditors: Iterable[Creditor], model: PerformanceModel
) -> list[SectionMove]:
    """Return the moves of a plan; nobody is on both sides of it.

    :param debtors: with other ids than the creditors.
    """
    places: Places = {}
    for one in creditors:
        if min(one.room, one.blocks) > 0 and one.reach.block_bytes:
            place = (one.reach.host, one.reach.block_bytes)
            places.setdefault(place, []).append((*one.rank, one))
    for heap in places.values():
        heapq.heapify(heap)
    small = [one for one in debtors if one.load.batch <= model.small_batch]
    moves: list[SectionMove] = []
    for debtor in sorted(small, key=lambda one: (one.load.batch, one.instance_id)):
        heap = places.get((debtor.reach.host, debtor.reach.block_bytes), [])
        moves += _borrowed(debtor, heap, model)
    return moves


def best_blocks(debtor: Debtor, creditor: Creditor, most: int, model: PerformanceModel) -> int:
    """Return how many sections, of 0 to ``most``, let both instances together make most tokens.

    The fewest of those that do, and only as many as are read elsewhere while the rest of the
    debtor's step is computed.
    """
    blocks = np.arange(most + 1, dtype=np.float64)
    tokens = blocks * debtor.reach.section_tokens
    size_bytes = blocks * debtor.reach.block_bytes
    together = model.together(debtor.load, creditor.load, tokens, size_bytes)
    if together[0] < 0:  # more is elsewhere already than is covered, and it stays
        return 0
    best = int(together.argmax())
    return best if together[best] > together[0] * (1 + 1e-9) else 0


def _borrowed(
    debtor: Debtor, heap: list[tuple[int, str, Creditor]], model: PerformanceModel
) -> list[SectionMove]:
    """One debtor's moves: creditors in order, until there is no gain."""
    moves: list[SectionMove] = []
    for request in sorted(debtor.longest, key=lambda one: (-one.num_blocks, one.req_id)):
        left = request.num_blocks
        while left and heap and debtor.blocks:
            _, _, creditor = heap[0]
            most = min(left, debtor.blocks, creditor.room, creditor.blocks)
            count = best_blocks(debtor, creditor, most, model)
            if not count:
                return moves
            names = debtor.instance_id, creditor.instance_id
            moves.append(SectionMove(request.req_id, *names, count))
            left -= count
            _note(debtor, creditor, count)
            heapq.heappop(heap)
            if creditor.spared > 0 and min(creditor.room, creditor.blocks) > 0:
                heapq.heappush(heap, (*creditor.rank, creditor))
    return moves


def _note(debtor: Debtor, creditor: Creditor, count: int) -> None:
    """Count a move on both sides."""
    tokens, size_bytes = count * debtor.reach.section_tokens, count * debtor.reach.block_bytes
    borrows, lends = debtor.load, creditor.load
    debtor.load = replace(
        borrows,
        spare_bytes=borrows.spare_bytes + size_bytes,
        away_tokens=borrows.away_tokens + tokens,
    )
    creditor.load = replace(
        lends, spare_bytes=lends.spare_bytes - size_bytes, lent_tokens=lends.lent_tokens + tokens
    )
    debtor.blocks -= count
    creditor.blocks -= count
    creditor.room -= count
    creditor.spared -= count
