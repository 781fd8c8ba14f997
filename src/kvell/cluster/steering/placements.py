"""The placement of the KV cache of requests that are longer than one instance's memory.

A placement is planned when a request is given to an instance, which is then a *debtor*; *creditors*
hold its first sections.  No instance is both, so while there is a debtor it gets all such requests.

Source: Infinite-LLM §5.2.1, §5.3.
"""

import heapq
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.steering.relief import ROOM_PART
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.statistics import InstanceFacts, ModelLengths
from kvell.mempool.loans.creditor_ledger import LENDABLE_PARTS
from kvell.vocabulary import RequestId

Placement = tuple[RequestPlacementEntry, ...]
NO_SECTIONS: Mapping[str, int] = MappingProxyType({})
Reading = Literal["in place", "asked"]
"""How an instance reads sections at another one: it computes over its pages in the memory of their
host, or asks it for attention over them."""
READINGS: tuple[Reading, ...] = ("in place", "asked")
"""The better one first.  All sections of a request are read in the same way."""
NO_LOANS: Mapping[Reading, int] = MappingProxyType({})


def ways_to_share(facts: InstanceFacts) -> dict[Reading, tuple[str, int]]:
    """Return the ways in which an instance lends and borrows sections, the better one first.

    Instances that have a way in common can share sections.
    """
    ways: dict[Reading, tuple[str, int]] = {}
    if facts.section_bytes:
        ways["in place"] = facts.host, facts.section_bytes
        if facts.is_asked:
            ways["asked"] = "", facts.section_bytes
    return ways


def reading_of(facts: InstanceFacts | None, other: InstanceFacts | None) -> Reading | None:
    """Return how one instance reads sections that another one lends; None if it cannot."""
    if facts is None or other is None:
        return None
    others = ways_to_share(other)
    common = (way for way, place in ways_to_share(facts).items() if others.get(way) == place)
    return next(common, None)


def local_sections(facts: InstanceFacts, lengths: ModelLengths) -> int:
    """Return the sections of a request with loans that its instance can hold; 0: no loans.

    :param lengths: the lengths of its model's requests; the same in :func:`longest_with`.
    """
    return lengths.max_model_len // facts.section_tokens if facts.section_bytes else 0


def longest_with(facts: InstanceFacts, lengths: ModelLengths, pool_bytes: Iterable[int]) -> int:
    """Return the most tokens of a request while instances with such pools lend all they can."""
    alone_tokens = lengths.max_model_len
    own = local_sections(facts, lengths)
    if not own or lengths.reach_tokens <= alone_tokens:
        return alone_tokens
    lent = sum(lendable_sections(pool, facts.section_bytes) for pool in pool_bytes)
    return max(alone_tokens, min(lengths.reach_tokens, (own + lent) * facts.section_tokens))


def lendable_sections(pool_bytes: int, section_bytes: int) -> int:
    return pool_bytes * (LENDABLE_PARTS - 1) // LENDABLE_PARTS // section_bytes


def placement(
    req_id: RequestId,
    blocks: int,
    most_local: int,
    home: InstanceLoad,
    others: Iterable[InstanceLoad],
    block_bytes: int,
    shared: Mapping[str, int] = NO_SECTIONS,
    expected: Mapping[str, int] = NO_SECTIONS,
) -> Placement:
    """Return the placement of a request's sections, its own instance first; empty without room.

    As many sections stay as there is room for.  The others go one by one to the instance with the
    most memory left, so that creditors become alike; an instance with less than a part of its pool
    gets sections only if no other has more.  Instances that could lend a section, but are not
    needed, follow at the end with none: they are asked when one of the others refuses.

    :param blocks: sections of the request, its whole answer included.
    :param most_local: sections that its own instance can hold while it has nothing else.
    :param shared: sections at other instances that an earlier request with the same text at the
        same instance has borrowed: they take no room.
    :param expected: sections that instances are still to lend to earlier requests.
    """
    rested = [other for other in others if not other.memory_waiting]
    kept = {other.instance_id: other.pool_bytes // ROOM_PART // block_bytes for other in rested}
    left: dict[str, int] = {}
    for other in rested:
        free = max(0, other.free_bytes // block_bytes - expected.get(other.instance_id, 0))
        left[other.instance_id] = min(free, lendable_sections(other.pool_bytes, block_bytes))
    lendable = sum(left.values())
    shared_blocks = sum(shared.values())
    wished = min(most_local, max(1, home.free_bytes // block_bytes))
    local = max(
        min(wished, blocks - shared_blocks), min(most_local, blocks - shared_blocks - lendable)
    )
    away = blocks - shared_blocks - local
    if local < 1 or away > lendable:
        return ()
    heap = [(most <= kept[name], -most, name) for name, most in left.items() if most]
    heapq.heapify(heap)
    taken = dict.fromkeys((*shared, *(name for _, _, name in sorted(heap))), 0) | dict(shared)
    for _ in range(away):
        _, _, name = heapq.heappop(heap)
        taken[name] += 1
        left[name] -= 1
        if left[name]:
            heapq.heappush(heap, (left[name] <= kept[name], -left[name], name))
    parts = sorted(taken.items(), key=lambda part: -part[1])
    creditors = (RequestPlacementEntry(req_id, name, count, local=False) for name, count in parts)
    return (RequestPlacementEntry(req_id, home.instance_id, local, local=True), *creditors)
