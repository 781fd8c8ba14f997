"""Algorithm 1: the moves of sections that let all instances together make the most tokens.

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

from kvell.cluster.steering.lending.model import PerformanceModel, ThroughputInputs
from kvell.cluster.steering.placements import LoanFacts
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.vocabulary import RequestId


@dataclass
class Debtor:
    """An instance that may borrow in one plan.

    :ivar load: load with planned loans.
    :ivar blocks: sections that may leave it in this plan.
    """

    instance_id: str
    facts: LoanFacts
    model: PerformanceModel
    load: ThroughputInputs
    longest: Sequence[RequestPlacementEntry]
    blocks: int


@dataclass
class Creditor:
    """An instance that may lend in one plan.

    :ivar load: load with planned loans.
    :ivar room: sections that it has memory for.
    :ivar spared: sections after which its utilisation is above the threshold, so that it lends no
        more.
    :ivar blocks: sections that may arrive in this plan.
    """

    instance_id: str
    facts: LoanFacts
    model: PerformanceModel
    load: ThroughputInputs
    room: int
    spared: int
    blocks: int

    @property
    def rank(self) -> tuple[int, str]:
        """Sort key among creditors: the most available memory first."""
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


def plan_moves(debtors: Iterable[Debtor], creditors: Iterable[Creditor]) -> list[SectionMove]:
    """Return the moves of a plan; no instance is on both sides of it.

    :param debtors: with other ids than the creditors.
    """
    places: Places = {}
    for creditor in creditors:
        if min(creditor.room, creditor.blocks) > 0 and creditor.facts.section_bytes:
            place = (creditor.facts.host, creditor.facts.section_bytes)
            places.setdefault(place, []).append((*creditor.rank, creditor))
    for heap in places.values():
        heapq.heapify(heap)
    small = [debtor for debtor in debtors if debtor.load.batch <= debtor.model.small_batch]
    moves: list[SectionMove] = []
    for debtor in sorted(small, key=lambda debtor: (debtor.load.batch, debtor.instance_id)):
        heap = places.get((debtor.facts.host, debtor.facts.section_bytes), [])
        moves += _borrowed(debtor, heap)
    return moves


def best_blocks(debtor: Debtor, creditor: Creditor, most: int) -> int:
    """Return how many sections, of 0 to ``most``, let both instances together make most tokens.

    Of equal numbers the smallest is returned.  The debtor must not read remote sections for longer
    than the rest of its step takes.
    """
    blocks = np.arange(most + 1, dtype=np.float64)
    tokens = blocks * debtor.facts.section_tokens
    size_bytes = blocks * debtor.facts.section_bytes
    lends = creditor.model.creditor(creditor.load, tokens, size_bytes)
    together = debtor.model.together(debtor.load, tokens, size_bytes, lends)
    if together[0] < 0:  # existing loans already take longer to read than the rest of the step
        return 0
    best = int(together.argmax())
    return best if together[best] > together[0] * (1 + 1e-9) else 0


def _borrowed(debtor: Debtor, heap: list[tuple[int, str, Creditor]]) -> list[SectionMove]:
    """Return one debtor's moves, with creditors in order, until there is no gain."""
    moves: list[SectionMove] = []
    for request in sorted(debtor.longest, key=lambda entry: (-entry.num_blocks, entry.req_id)):
        left = request.num_blocks
        while left and heap and debtor.blocks:
            _, _, creditor = heap[0]
            most = min(left, debtor.blocks, creditor.room, creditor.blocks)
            count = best_blocks(debtor, creditor, most)
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
    tokens, size_bytes = count * debtor.facts.section_tokens, count * debtor.facts.section_bytes
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
