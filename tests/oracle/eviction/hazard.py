"""The learned worth of cached chunks: those that return soonest for their memory have the most.

A prompt is a chain of chunks; the key of a chunk stands for the chunk and all before it.  When
a request ends, its chunks are put into *classes*::

    kind    used once (by a request with a small hit, or a larger one), twice, three times,
            more often; a partial last chunk is a kind of its own
    hint    the client's hint that the conversation will return, that it will not, or none
    output  the number of tokens that the request generated, in powers of two

Chunks of one request that were used equally often are a *run*.  For every run the table counts
which ages it reached and at which ages its chunks returned, even long after their eviction
(*ghosts*: keys only).  From these counts ``hazard_fit`` makes an index: expected returns per
time of residence, by class and age.  The owner of the cache keeps a queue by time for each
class, and evicts the oldest of the class whose oldest has the least :meth:`HazardTable.value`.

Before the first fit, and if all classes are alike, this is least recently used.

Time is any increasing integer.  Memory is bounded: ``REMEMBERED`` keys per chunk of the cache.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from kvell.prefix.eviction.hazard import (
    AGES,
    BOUNDS,
    HINTS,
    NUM_CLASSES,
    OUTPUTS,
    REFIT_REQUESTS,
    REMEMBERED,
    Learn,
    learn,
)
from tests.oracle.eviction.hazard_fit import PARTIAL

_MOST_USES = 4
_LEAST_OUTPUT_LOG2 = 4


@dataclass(frozen=True)
class Run:
    """The chunks of one request and one class, up to (not including) chunk ``end``."""

    end: int
    eviction_class: int


@dataclass(slots=True, eq=False)
class _Past:
    """A run with some chunks that are neither accessed again nor forgotten."""

    eviction_class: int
    time: int
    weight: float
    left: int = 0


def class_of(kind: int, will_return: bool | None, output_tokens: int) -> int:
    """Return the number of a class; all partial chunks share one, whatever the request."""
    if kind == PARTIAL:
        return PARTIAL
    hint = 0 if will_return is None else 1 if will_return else 2
    log2 = (output_tokens + 1).bit_length() - 1
    output = min(max(log2 - _LEAST_OUTPUT_LOG2, 0), OUTPUTS - 1)
    return (kind * HINTS + hint) * OUTPUTS + output


class HazardTable:
    """The classes of chunks after their request, and the worth of each class by age.

    :param capacity_chunks: the approximate number of chunks that the cache holds.
    :param first_refit: the number of requests before the first fit.
    :param learn: fits the counts, and returns when to fit again.
    """

    def __init__(
        self, capacity_chunks: int, first_refit: int = REFIT_REQUESTS, learn: Learn = learn
    ) -> None:
        self._most_keys = REMEMBERED * max(1, capacity_chunks)
        self._known: dict[int, tuple[int, _Past]] = {}
        self._aging: list[deque[_Past]] = [deque() for _ in range(AGES)]
        self._entered = np.zeros((NUM_CLASSES, AGES))
        self._returned = np.zeros((NUM_CLASSES, AGES))
        self._events = np.zeros(NUM_CLASSES)
        self._index: list[list[float]] | None = None
        self._requests = 0
        self._next_refit, self._learn_from = first_refit, learn

    def value(self, eviction_class: int, age: int) -> float:
        """Return the worth of a chunk of this class and age; the least is evicted first.

        The worth never increases with age.  It is interpolated linearly between the middles of two
        buckets.
        """
        if self._index is None:
            return 0.0
        row, bucket = self._index[eviction_class], min(bisect_right(BOUNDS, age) - 1, AGES - 1)
        part = (age - BOUNDS[bucket]) / (BOUNDS[bucket + 1] - BOUNDS[bucket]) - 0.5
        if part < 0 and bucket:
            bucket, part = bucket - 1, part + 1
        after = row[min(bucket + 1, AGES - 1)]
        part = min(max(part, 0.0), 1.0)
        return max(after, row[bucket] + part * (after - row[bucket]))  # rounding: no less

    def access(
        self,
        chain: Sequence[int],
        now: int,
        *,
        output_tokens: int,
        ends_partial: bool = False,
        will_return: bool | None = None,
    ) -> list[Run]:
        """Record a request with these chunks that ends now, and return their runs in order.

        :param ends_partial: whether the last key stands for less than a chunk.
        """
        self._age(now)
        if not chain:
            return []
        hit_chunks = next((i for i, key in enumerate(chain) if key not in self._known), len(chain))
        uses = self._leave_past_runs(chain, now)
        starts = [i for i, count in enumerate(uses) if not i or count != uses[i - 1]]
        if ends_partial and starts[-1] != len(chain) - 1:
            starts.append(len(chain) - 1)
        runs = []
        for start, end in zip(starts, [*starts[1:], len(chain)], strict=True):
            kind = uses[start] + (uses[start] > 1 or hit_chunks > 1)
            if ends_partial and end == len(chain):
                kind = PARTIAL
            runs.append(Run(end, class_of(kind, will_return, output_tokens)))
        self._enter(chain, uses, runs, now)
        self._requests += 1
        promoted = self._promoted(runs)
        if self._requests >= self._next_refit:
            self._learn()
        return promoted

    def _leave_past_runs(self, chain: Sequence[int], now: int) -> list[int]:
        """Count the returned chunks, and return each chunk's uses, the current one included."""
        uses, last = [], None
        for key in chain:
            count, past = self._known.get(key, (0, None))
            uses.append(min(count + 1, _MOST_USES))
            if past is None:
                continue
            past.left -= 1
            bucket = bisect_right(BOUNDS, now - past.time) - 1
            if bucket < AGES:
                self._returned[past.eviction_class, bucket] += past.weight
            if past is not last:
                self._events[past.eviction_class] += 1
            last = past
        return uses

    def _enter(
        self, chain: Sequence[int], uses: Sequence[int], runs: Sequence[Run], now: int
    ) -> None:
        start, entries = 0, []
        for run in runs:
            size = run.end - start
            past = _Past(run.eviction_class, now, 1 / sqrt(size), size)
            self._aging[0].append(past)
            self._entered[run.eviction_class, 0] += past.weight * size
            entries += [(i, past) for i in range(start, run.end)]
            start = run.end
        for i, past in reversed(entries):  # forget a prompt's end before its beginning
            self._known.pop(chain[i], None)
            self._known[chain[i]] = (uses[i], past)
        while len(self._known) > self._most_keys:
            _, past = self._known.pop(next(iter(self._known)))
            past.left -= 1

    def _age(self, now: int) -> None:
        """Count the runs that have reached their next bucket."""
        for bucket in range(AGES):
            aging = self._aging[bucket]
            while aging and now - aging[0].time >= BOUNDS[bucket + 1]:
                past = aging.popleft()
                if past.left and bucket + 1 < AGES:
                    weight = past.weight * past.left
                    self._entered[past.eviction_class, bucket + 1] += weight
                    self._aging[bucket + 1].append(past)

    def _promoted(self, runs: list[Run]) -> list[Run]:
        """Return runs in which a prefix has at least the worth of its continuation, merged by
        class."""
        promoted = [runs[-1]]
        for run in reversed(runs[:-1]):
            best = promoted[-1].eviction_class
            if self.value(run.eviction_class, 0) >= self.value(best, 0):
                best = run.eviction_class
            if best != promoted[-1].eviction_class:
                promoted.append(Run(run.end, best))
        return promoted[::-1]

    def _learn(self) -> None:
        result = self._learn_from(self._entered, self._returned, self._events, self._requests)
        self._index, self._next_refit = result.index.tolist(), result.next_refit
        self._entered *= result.fading
        self._returned *= result.fading
        self._events *= result.fading
