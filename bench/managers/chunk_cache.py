"""A cache of prompts' chunks, one request after the other: the yardstick's simulator.

A chunk hits when all chunks before it in the prompt are cached; the running request's chunks
stay.  The caches here differ in what they evict first.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvell.prefix.eviction.hazard import HazardTable
from kvell.simulator.traces.rows import TraceRow


@dataclass(frozen=True)
class Prompt:
    """One request: keys of its chunks, the last of them maybe less than ``chunk_tokens``."""

    chain: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    chunk_tokens: int

    @property
    def ends_partial(self) -> bool:
        """Whether the last key stands for less than a chunk."""
        return len(self.chain) * self.chunk_tokens > self.prompt_tokens


def prompt_of(row: TraceRow) -> Prompt:
    """A row of a trace with block ids."""
    chain = tuple(row.block_ids.tolist())
    return Prompt(chain, row.prompt_tokens, row.output_tokens, row.block_tokens)


class ChunkCache(Protocol):
    """A cache of chunks with an eviction order."""

    def __contains__(self, key: int) -> bool:
        """Whether the chunk is cached."""
        ...

    def serve(self, prompt: Prompt, index: int, capacity: int) -> None:
        """Cache as much of request number ``index`` as fits, evicting others' chunks."""
        ...


def hit_rate(prompts: Sequence[Prompt], capacity: int, cache: ChunkCache) -> float:
    """Part of all prompt tokens that hit."""
    hit_tokens = 0
    for index, prompt in enumerate(prompts):
        found = next((i for i, key in enumerate(prompt.chain) if key not in cache), None)
        whole = len(prompt.chain) if found is None else found
        hit_tokens += min(whole * prompt.chunk_tokens, prompt.prompt_tokens)
        cache.serve(prompt, index, capacity)
    return hit_tokens / sum(prompt.prompt_tokens for prompt in prompts)


def distinct_chunks(prompts: Sequence[Prompt]) -> int:
    """Number of distinct chunks."""
    return len({key for prompt in prompts for key in prompt.chain})


class Ordered:
    """Each access gives a chunk a place; the smallest is evicted first, ties deepest first."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []

    def __contains__(self, key: int) -> bool:
        return key in self._places

    def places(self, prompt: Prompt, index: int) -> Sequence[int]:
        """Places of the prompt's chunks: least recently used."""
        return [index] * len(prompt.chain)

    def serve(self, prompt: Prompt, index: int, capacity: int) -> None:
        """Cache a prompt's chunks; see :class:`ChunkCache`."""
        kept = prompt.chain[:capacity]
        mine = set(kept)
        excess = len(self._places) + sum(key not in self._places for key in kept) - capacity
        while excess > 0:
            place, key = heapq.heappop(self._heap)
            if key not in mine and self._places.get(key) == place:
                del self._places[key]
                excess -= 1
        for depth, (key, age) in enumerate(zip(kept, self.places(prompt, index), strict=False)):
            self._places[key] = (age, -depth)
            heapq.heappush(self._heap, (self._places[key], key))


class Belady(Ordered):
    """Evicts what is used again the latest, which is optimal."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        super().__init__()
        self._next_uses: list[list[int]] = []
        coming: dict[int, int] = {}
        for index in range(len(prompts) - 1, -1, -1):
            chain = prompts[index].chain
            self._next_uses.append([coming.get(key, len(prompts)) for key in chain])
            coming.update(dict.fromkeys(chain, index))
        self._next_uses.reverse()

    def places(self, prompt: Prompt, index: int) -> Sequence[int]:
        """Places of the prompt's chunks: the latest next use first."""
        return [-use for use in self._next_uses[index]]


@dataclass(eq=False)
class _Queued:
    """Chunks of one request and class, the deepest last; chunks accessed since have left."""

    time: int
    keys: list[int]


class ByHazard:
    """A queue for each class of :class:`kvell.prefix.eviction.hazard.HazardTable`, by time.

    :param hints: for each request the client's hint that it will return; None: no hints.
    """

    def __init__(self, capacity: int, hints: Sequence[bool] | None = None) -> None:
        self._table = HazardTable(capacity)
        self._hints = hints
        self._where: dict[int, _Queued] = {}
        self._queues: defaultdict[int, deque[_Queued]] = defaultdict(deque)

    def __contains__(self, key: int) -> bool:
        return key in self._where

    def serve(self, prompt: Prompt, index: int, capacity: int) -> None:
        """Cache a prompt's chunks; see :class:`ChunkCache`."""
        kept = prompt.chain[:capacity]
        runs = self._table.access(
            prompt.chain,
            index,
            output_tokens=prompt.output_tokens,
            ends_partial=prompt.ends_partial,
            will_return=None if self._hints is None else self._hints[index],
        )
        excess = len(self._where) + sum(key not in self._where for key in kept) - capacity
        for key in kept:  # the running request is in no queue
            self._where.pop(key, None)
        self._evict(excess, index)
        start = 0
        for run in runs:
            queued = _Queued(index, list(kept[start : run.end]))
            self._queues[run.eviction_class].append(queued)
            self._where.update(dict.fromkeys(queued.keys, queued))
            start = run.end

    def _evict(self, count: int, now: int) -> None:
        heads = [
            (self._table.value(number, now - queue[0].time), queue[0].time, number)
            for number, queue in self._queues.items()
            if queue
        ]
        heapq.heapify(heads)
        while count > 0:
            number = heads[0][2]
            queue = self._queues[number]
            count -= self._evict_from(queue[0], count)
            if queue[0].keys:
                continue
            queue.popleft()
            if queue:
                value = self._table.value(number, now - queue[0].time)
                heapq.heapreplace(heads, (value, queue[0].time, number))
            else:
                heapq.heappop(heads)

    def _evict_from(self, queued: _Queued, count: int) -> int:
        evicted = 0
        while queued.keys and evicted < count:
            key = queued.keys.pop()
            if self._where.get(key) is queued:
                del self._where[key]
                evicted += 1
        return evicted
