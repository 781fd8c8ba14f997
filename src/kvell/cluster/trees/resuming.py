"""How far each of many instances can resume a prompt, from who holds which of its blocks.

The rules are those of :mod:`kvell.prefix.index.hits`, for all instances at once: a set of instances
is an integer's bits.  Blocks that follow one another and are held by the same instances form a
*run*; prompts have few of them, so little is done for each block.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvell.cluster.trees.groups import WHOLE, TreeGroup
from kvell.memory import GroupKind

FIRST_LOOK = 64
"""Blocks that are looked at before more are: most prompts share little or nothing."""


class Resumable(Protocol):
    """Who can resume where, as far as one layer group is concerned."""

    def at(self, length: int) -> int:
        """Return the instances that have all that the group needs after ``length`` tokens."""
        ...

    def edges(self, limit_tokens: int) -> Iterable[int]:
        """Return the lengths in tokens beyond which some instance may no longer resume."""
        ...


class WholeRuns:
    """A group that needs every block from the first on.

    :param found: who holds each block.
    """

    def __init__(self, group: TreeGroup, found: Sequence[int]) -> None:
        starts, holders = runs_of(found)
        self._group = group
        self._ends: list[int] = []
        self._holders: list[int] = []
        held = -1
        for index, bits in enumerate(holders):
            if (shared := held & bits) != held:
                if index:
                    self._ends.append(starts[index])
                    self._holders.append(held)
                held = shared
            if not held:
                return
        self._ends.append(len(found))
        self._holders.append(held)

    @property
    def most_tokens(self) -> int:
        """The longest length that anybody can resume."""
        return self._ends[-1] * self._group.block_tokens if self._ends else 0

    def at(self, length: int) -> int:
        """See :class:`Resumable`."""
        run = bisect_left(self._ends, self._group.end_block(length))
        return self._holders[run] if run < len(self._ends) else 0

    def edges(self, limit_tokens: int) -> Iterable[int]:
        """See :class:`Resumable`."""
        return (end * self._group.block_tokens for end in self._ends)


class WindowRuns:
    """A group that needs the blocks of its window, or of its chunk.

    :param found: who holds each block.
    """

    def __init__(self, group: TreeGroup, found: Sequence[int]) -> None:
        self._group, self._blocks = group, len(found)
        self._starts, self._holders = runs_of(found)

    def at(self, length: int) -> int:
        """See :class:`Resumable`."""
        first, end = self._group.first_block(length), self._group.end_block(length)
        if end > self._blocks:
            return 0
        held = -1
        if first < end:
            begin = bisect_right(self._starts, first) - 1
            for bits in self._holders[begin : bisect_left(self._starts, end)]:
                held &= bits
        return held

    def edges(self, limit_tokens: int) -> Iterable[int]:
        """See :class:`Resumable`."""
        # Within a run a longer prefix needs fewer old blocks, and new ones with equal holders.
        # Where a chunk ends nothing is needed, so it is no loss to begin the next one.
        group = self._group
        ends = [block * group.block_tokens for block in self._starts]
        if group.kind is GroupKind.CHUNKED:
            ends += range(0, limit_tokens + 1, group.window_tokens)
        return ends


class States:
    """A group that needs a state exactly there.

    :param found: who has a state at the end of each block.
    """

    def __init__(self, group: TreeGroup, found: Sequence[int]) -> None:
        size = group.block_tokens
        self._held = {(i + 1) * size: bits for i, bits in enumerate(found) if bits}

    def at(self, length: int) -> int:
        """See :class:`Resumable`."""
        return self._held.get(length, 0)

    def edges(self, limit_tokens: int) -> Iterable[int]:
        """See :class:`Resumable`."""
        return self._held


def resumable(group: TreeGroup, found: Sequence[int]) -> Resumable:
    """Return the rule of a group's kind.

    :param found: who holds each block from the first on, as bits.
    """
    if group.kind in WHOLE:
        return WholeRuns(group, found)
    return States(group, found) if group.kind is GroupKind.STATE else WindowRuns(group, found)


def longest(
    rules: Sequence[Resumable], limit_tokens: int, alignment_tokens: int, live: int
) -> list[tuple[int, int]]:
    """Return how far instances can resume: (length in tokens, their bits), the longest first.

    Every instance is in one entry at most.  Lengths are whole blocks of all groups, and the limit
    itself: a block that is cached as a whole serves those who need only its beginning.

    :param rules: of all groups that a hit needs.
    :param live: the instances that are asked about.
    """
    edges = {limit_tokens}
    for rule in rules:
        edges.update(rule.edges(limit_tokens))
    step = alignment_tokens
    lengths = {min(edge, limit_tokens) // step * step for edge in edges} | {limit_tokens}
    left, told = live, []
    for length in sorted(lengths, reverse=True):
        if length <= 0:
            break
        can = left
        for rule in rules:
            can &= rule.at(length)
            if not can:
                break
        else:
            told.append((length, can))
            left ^= can
            if not left:
                break
    return told


def runs_of(found: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return where runs of blocks with equal holders start, in blocks, and those holders."""
    starts: list[int] = []
    holders: list[int] = []
    before: int | None = None
    for index, bits in enumerate(found):
        if bits is not before and bits != before:
            starts.append(index)
            holders.append(bits)
            before = bits
    return starts, holders
