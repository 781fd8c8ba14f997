"""The learned rule over pages: classes of what a request leaves, by what ``hazard`` knows.

A key's class is part of it (class and ``prefix_length`` make its last number), so that pool and
index need not know of classes.  Only pages of rank ``NORMAL`` are ordered by worth: what is kept
while memory is idle goes first, as ever, the least recently used before the others.
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
"""Of a key's last number: prefixes are shorter than 4 G tokens."""
RUNNING_STEPS = 64
"""What a running request leaves behind is renewed more often than that, and stays as its other
pages do, which it uses."""
WORTH_STEPS = 8
"""Ages are looked at every so many steps: who goes first hardly changes more often, and finding it
costs a look at every class."""
_ONCE = 1
"""A kind."""
_FIRST_ONCE = class_of(_ONCE, None, 0)
"""Numbers below are what running requests leave: no chunk here is partial."""


class LearnedHazard:
    """:class:`kvell.prefix.eviction.evictor.EvictionRule` that learns; one pool's own.

    Time is the step; ages are steps.

    :param capacity_tokens: how many the pool keeps, about.
    :param chunk_tokens: of a prompt that are counted together.
    :param first_refit: see :class:`HazardTable`, and ``learn``.
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
        """What the compiled twin is made with (``HazardSettings`` in hazard.h)."""

    def key(self, rank: int, time: int, prefix_length: int, eviction_class: int = 0) -> Key:
        """By rank, time and the longest prefix; of those worth something, a class has its own."""
        number = eviction_class if rank == NORMAL else 0
        return (rank, time, (number << PREFIX_BITS) - prefix_length)

    def eviction_class(self, key: Key) -> int:
        """The class that a key was made with."""
        return -(-key[2] >> PREFIX_BITS)

    def place(self, key: Key, now: int) -> Place:
        """By rank, what it is worth at its age, time and the longest prefix."""
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
        """Whatever is cached with this rank may go, and all below."""
        return (rank, inf)

    def class_before(
        self, expected_output_tokens: int, will_return: bool | None, *, is_running: bool
    ) -> int:
        """Used once, as far as is known; while it runs, for a while worth more than all else."""
        once = class_of(_ONCE, will_return, expected_output_tokens)
        return once - _FIRST_ONCE if is_running else once

    def ended_at(self, now: int, expected: int) -> int:
        """No earlier than was expected: what it left has another class now."""
        return max(now, expected)

    def accessed(self, ending: Ending, now: int) -> list[Run]:
        """The request ends: its classes, by tokens."""
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
        """``learn`` for the compiled twin, whose arrays of float64 come and go as bytes."""
        counts = [np.frombuffer(each) for each in (entered, returned, events)]
        found = self._learn(counts[0], counts[1], counts[2], requests)
        return np.ascontiguousarray(found.index).tobytes(), found.fading, found.next_refit


def capacity_tokens(layout: Layout) -> int:
    """About how many tokens the pool keeps: those whose pages in all groups that hold every
    token fill it; without such groups, in all that count tokens, or one a page."""
    whole = [group for group in layout.groups if group.kind is GroupKind.FULL]
    counted = whole or [group for group in layout.groups if group.kind.counts_tokens]
    sizes = [g.page_stride_bytes / g.page_tokens for g in counted or layout.groups]
    return max(1, int(layout.pool_bytes / sum(sizes)))
