"""The placement of the KV cache of requests that are longer than one instance's memory.

A placement is planned when a request is given to an instance, which is then a *debtor*; *creditors*
hold its first sections.  No instance is both, so while there is a debtor it gets all such requests.

Source: Infinite-LLM §5.2.1, §5.3.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvell.cluster.steering.relief import ROOM_PART, MemoryView
from kvell.engine.protocol.messages import Ready
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.mempool.loans.ledger import LENDABLE_PARTS
from kvell.vocabulary import SECTION_TOKENS, RequestId

Placement = tuple[RequestPlacementEntry, ...]
NOTHING_SHARED: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """The maximum length of an instance's requests, alone and with loans.

    :param alone_tokens: most tokens of a request without loans.
    :param most_tokens: most tokens of a request with all the loans that it needs; 0: none are made.
    :param block_bytes: KV memory of a section, the unit of loans; 0: none are made.
    :param section_tokens: tokens of a section.
    :param host: host whose instances read each other's memory in place; "" is the front's.
    """

    alone_tokens: int = 0
    most_tokens: int = 0
    block_bytes: int = 0
    section_tokens: int = SECTION_TOKENS
    host: str = ""

    @classmethod
    def of(cls, ready: Ready) -> "ContextLimits":
        """Return the limits of an instance from its ``Ready``; all that lend are on one host."""
        return cls(ready.max_model_len, ready.reach_tokens, ready.section_bytes)

    def meets(self, other: "ContextLimits") -> bool:
        """Return whether instances read each other's sections in place."""
        return 0 < self.block_bytes == other.block_bytes and self.host == other.host

    @property
    def local_blocks(self) -> int:
        """Sections of a request with loans that the instance itself can hold; 0: no loans."""
        return self.alone_tokens // self.section_tokens if self.block_bytes else 0

    def with_others(self, pool_bytes: Iterable[int]) -> int:
        """Return the most tokens of a request while instances with such pools lend all they can."""
        if not self.local_blocks or self.most_tokens <= self.alone_tokens:
            return self.alone_tokens
        lent_blocks = sum(lendable_blocks(pool, self.block_bytes) for pool in pool_bytes)
        reached_tokens = (self.local_blocks + lent_blocks) * self.section_tokens
        return max(self.alone_tokens, min(self.most_tokens, reached_tokens))


NO_REACH = ContextLimits()


def lendable_blocks(pool_bytes: int, block_bytes: int) -> int:
    """Return the sections that an idle instance could lend."""
    return pool_bytes * (LENDABLE_PARTS - 1) // LENDABLE_PARTS // block_bytes


def placement(
    req_id: RequestId,
    blocks: int,
    most_local: int,
    home: MemoryView,
    others: Iterable[MemoryView],
    block_bytes: int,
    shared: Mapping[str, int] = NOTHING_SHARED,
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
    """
    rested = [view for view in others if not view.waiting]
    kept = {view.instance_id: view.pool_bytes // ROOM_PART // block_bytes for view in rested}
    left = {view.instance_id: _lendable(view, block_bytes) for view in rested}
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


def _lendable(view: MemoryView, block_bytes: int) -> int:
    """Return the sections that an instance could lend now."""
    return min(view.free_bytes // block_bytes, lendable_blocks(view.pool_bytes, block_bytes))
