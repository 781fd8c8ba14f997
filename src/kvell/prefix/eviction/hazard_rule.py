"""The learned eviction rule over pages: keys that carry the classes ``hazard`` learns about.

A key carries its class (class and ``prefix_length`` make its last number), so pool and index need
not know classes.  Only pages of rank ``NORMAL`` are ordered by worth.  Pages kept only while memory
is idle still go first, the least recently used of them before the others.
"""

from math import inf

import numpy as np

from kvell.pages.layout import GroupKind, Layout
from kvell.pages.pool import Key
from kvell.prefix.eviction.evictor import NORMAL, Ending, Place
from kvell.prefix.eviction.hazard import (
    BOUNDS,
    REFIT_REQUESTS,
    REMEMBERED,
    HazardTable,
    Learn,
    Run,
    class_of,
    learned,
)
from kvell.prefix.eviction.shadow import chain_of

CHUNK_TOKENS = 256
PREFIX_BITS = 32
"""Bits of the prefix length in a key's last number: prefixes are shorter than 4 G tokens."""
RUNNING_STEPS = 64
"""Age up to which what a running request leaves behind is kept like the pages it uses; it is
renewed more often than that."""
WORTH_STEPS = 8
"""Steps between two updates of ages: the next victim hardly changes more often, and finding it
costs a look at every class."""
_ONCE = 1
"""Number of the kind of chunks used once, by a request that found little cached."""
_FIRST_ONCE = class_of(_ONCE, None, 0)
"""Lower numbers stand for what running requests leave; they are free, since no chunk here is
partial."""


class LearnedHazard:
    """A :class:`kvell.prefix.eviction.evictor.EvictionRule` that learns; each pool needs its own.

    Time is the step; ages are steps.

    :param capacity_tokens: about how many tokens the pool keeps.
    :param chunk_tokens: prompt tokens that are counted together.
    :param first_refit: see :class:`HazardTable`, as for ``learn``.
    """

    def __init__(
        self,
        capacity_tokens: int,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        first_refit: int = REFIT_REQUESTS,
        learn: Learn = learned,
    ) -> None:
        chunks = max(1, -(-capacity_tokens // chunk_tokens))
        self._chunk_tokens = chunk_tokens
        self._table = HazardTable(chunks, first_refit, learn)
        self._learn = learn
        self.settings = (REMEMBERED * chunks, chunk_tokens, first_refit, BOUNDS)
        """Arguments of the compiled twin (``HazardSettings`` in hazard.h)."""

    def key(self, rank: int, time: int, prefix_length: int, eviction_class: int = 0) -> Key:
        """Order by rank, time and longest prefix; keys of rank ``NORMAL`` carry their class."""
        number = eviction_class if rank == NORMAL else 0
        return (rank, time, (number << PREFIX_BITS) - prefix_length)

    def eviction_class(self, key: Key) -> int:
        """Return the class that a key was made with."""
        return -(-key[2] >> PREFIX_BITS)

    def place(self, key: Key, now: int) -> Place:
        """Order by rank, worth at the current age, time and longest prefix."""
        rank, time, last = key
        number = self.eviction_class(key)
        age = max(0, now - now % WORTH_STEPS - time)
        worth = self._worth(number, age) if rank == NORMAL else 0.0
        return (rank, worth, time, last - (number << PREFIX_BITS))

    def _worth(self, eviction_class: int, age: int) -> float:
        if eviction_class >= _FIRST_ONCE:
            return self._table.value(eviction_class, age)
        return inf if age <= RUNNING_STEPS else self._table.value(eviction_class + _FIRST_ONCE, age)

    def limit(self, rank: int, now: int) -> Place:
        """Let anything cached with this rank or a lower one give way."""
        return (rank, inf)

    def class_before(
        self, expected_output_tokens: int, will_return: bool | None, *, is_running: bool
    ) -> int:
        """Return the class of what was used once; a running request has one worth more than all
        others for a while."""
        once = class_of(_ONCE, will_return, expected_output_tokens)
        return once - _FIRST_ONCE if is_running else once

    def ended_at(self, now: int, expected: int) -> int:
        """Return the expected end if it is later: what the request left has another class now."""
        return max(now, expected)

    def accessed(self, ending: Ending, now: int) -> list[Run]:
        """Record that the request ended; returns the classes of its prefixes, by tokens."""
        runs = self._table.access(
            chain_of(ending.tokens, ending.root, self._chunk_tokens),
            now,
            output_tokens=ending.output_tokens,
            will_return=ending.will_return,
        )
        return [Run(run.end * self._chunk_tokens, run.eviction_class) for run in runs]

    def refit(
        self, entered: bytes, returned: bytes, events: bytes, requests: int
    ) -> tuple[bytes, float, int]:
        """Call ``learn`` for the compiled twin, whose float64 arrays are passed as bytes."""
        counts = [np.frombuffer(each) for each in (entered, returned, events)]
        found = self._learn(counts[0], counts[1], counts[2], requests)
        return np.ascontiguousarray(found.index).tobytes(), found.fading, found.next_refit


def capacity_tokens(layout: Layout) -> int:
    """Estimate how many tokens the pool keeps.

    A token takes its bytes in all groups that hold every token; without such groups, in all that
    count tokens; without those either, a page in each group.
    """
    whole = [group for group in layout.groups if group.kind is GroupKind.FULL]
    counted = whole or [group for group in layout.groups if group.kind.counts_tokens]
    sizes = [g.page_stride_bytes / g.page_tokens for g in counted or layout.groups]
    return max(1, int(layout.pool_bytes / sum(sizes)))
