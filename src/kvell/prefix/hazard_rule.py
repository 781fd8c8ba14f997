"""The learned rule over pages: classes of what a request leaves, by what ``hazard`` knows.

A key's class is part of it (``prefix_length`` and class make its last number), so that pool and
index need not know of classes.  Only pages of rank ``NORMAL`` are ordered by worth: what is kept
while memory is idle goes first, as ever.
"""

from math import inf

from kvell.pages.layout import GroupKind, Layout
from kvell.pages.pool import Key
from kvell.prefix.evictor import NORMAL, Ending, Place
from kvell.prefix.hazard import NUM_CLASSES, HazardTable, Run, class_of
from kvell.prefix.shadow import chain_of

CHUNK_TOKENS = 128
_ONCE, _LATER = 1, 2


class LearnedHazard:
    """:class:`kvell.prefix.evictor.EvictionRule` that learns; one pool's own.

    Time is the step; ages are steps.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._table = HazardTable(-(-capacity_tokens // CHUNK_TOKENS))

    def key(self, rank: int, time: int, prefix_length: int, eviction_class: int = 0) -> Key:
        """By rank, time and the longest prefix; the class breaks what ties are left."""
        return (rank, time, eviction_class - prefix_length * NUM_CLASSES)

    def eviction_class(self, key: Key) -> int:
        """The class that a key was made with."""
        return key[2] % NUM_CLASSES

    def place(self, key: Key, now: int) -> Place:
        """By rank, what it is worth at its age, time and the longest prefix."""
        rank, time, last = key
        minus_length, number = divmod(last, NUM_CLASSES)
        worth = self._table.value(number, max(0, now - time)) if rank == NORMAL else 0.0
        return (rank, worth, time, minus_length)

    def limit(self, rank: int, now: int) -> Place:
        """Whatever is cached with this rank may go, and all below."""
        return (rank, inf)

    def running_class(self, ending: Ending) -> int:
        """What a request leaves before it ends: used once, as far as is known."""
        kind = _LATER if ending.hit_tokens else _ONCE
        return class_of(kind, ending.will_return, ending.output_tokens)

    def accessed(self, ending: Ending, now: int) -> list[Run]:
        """The request ends: its classes, by tokens."""
        runs = self._table.access(
            chain_of(ending.tokens, ending.root, CHUNK_TOKENS),
            now,
            output_tokens=ending.output_tokens,
            will_return=ending.will_return,
        )
        return [Run(run.end * CHUNK_TOKENS, run.eviction_class) for run in runs]


def capacity_tokens(layout: Layout) -> int:
    """About how many tokens the pool keeps: those whose pages in all groups that hold every
    token fill it; without such groups, in all that count tokens, or one a page."""
    whole = [group for group in layout.groups if group.kind is GroupKind.FULL]
    counted = whole or [group for group in layout.groups if group.kind.counts_tokens]
    sizes = [g.page_stride_bytes / g.page_tokens for g in counted or layout.groups]
    return max(1, int(layout.pool_bytes / sum(sizes)))
