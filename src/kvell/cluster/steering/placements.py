"""Where the KV cache of a request lies that is longer than the memory of one instance.

Planned when it is given to an instance, which is then a *debtor*; *creditors* hold its first
sections.  No instance is both, so all such requests of a debtor's time go to it.

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
class Reach:
    """How long the requests of an instance can be.

    :param alone_tokens: most tokens of a request while nobody lends.
    :param most_tokens: the same if others lend as much as it takes; 0: none do.
    :param block_bytes: KV memory of a section, the unit that is lent; 0: none is.
    :param section_tokens: tokens of a section.
    :param host: whose instances read each other's memory in place; "" is the front's.
    """

    alone_tokens: int = 0
    most_tokens: int = 0
    block_bytes: int = 0
    section_tokens: int = SECTION_TOKENS
    host: str = ""

    @classmethod
    def of(cls, ready: Ready) -> "Reach":
        """As an instance says at its start; those that lend are all of one host."""
        return cls(ready.max_model_len, ready.reach_tokens, ready.section_bytes)

    def meets(self, other: "Reach") -> bool:
        """Whether instances read each other's sections in place."""
        return 0 < self.block_bytes == other.block_bytes and self.host == other.host

    @property
    def local_blocks(self) -> int:
        """Sections that it can hold of a request for which others lend; 0: they do not."""
        return self.alone_tokens // self.section_tokens if self.block_bytes else 0

    def with_others(self, pool_bytes: Iterable[int]) -> int:
        """Most tokens of a request while instances with such pools lend all that they can."""
        if not self.local_blocks or self.most_tokens <= self.alone_tokens:
            return self.alone_tokens
        lent_blocks = sum(lendable_blocks(one, self.block_bytes) for one in pool_bytes)
        reached_tokens = (self.local_blocks + lent_blocks) * self.section_tokens
        return max(self.alone_tokens, min(self.most_tokens, reached_tokens))


NO_REACH = Reach()


def lendable_blocks(pool_bytes: int, block_bytes: int) -> int:
    """Sections that an instance with nothing to do could lend."""
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
    """Return where a request's sections lie, its own instance first; empty if there is no room.

    As many as there is room for stay.  The others go one by one to the instance that has most
    memory left, so that creditors become alike; below a part of its pool an instance goes only
    where no other has more.  Instances that could lend a section, and are not needed, stand at the
    end with none: they are asked when one of the others refuses.

    :param blocks: sections of the request, its whole answer included.
    :param most_local: that its own instance can hold while it has nothing else.
    :param shared: sections that lie at others already, for a request over the same text to the same
        instance: they take no room.
    """
    rested = [one for one in others if not one.waiting]
    kept = {one.instance_id: one.pool_bytes // ROOM_PART // block_bytes for one in rested}
    left = {one.instance_id: _lendable(one, block_bytes) for one in rested}
    lendable = sum(left.values())
    known = sum(shared.values())
    wished = min(most_local, max(1, home.free_bytes // block_bytes))
    local = max(min(wished, blocks - known), min(most_local, blocks - known - lendable))
    away = blocks - known - local
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


def _lendable(one: MemoryView, block_bytes: int) -> int:
    """Sections that an instance could lend now."""
    return min(one.free_bytes // block_bytes, lendable_blocks(one.pool_bytes, block_bytes))
