"""The length of a prompt that each of many instances can resume, from the holders of its blocks.

The rules are those of the memory core (``csrc/memory/hits.cpp``), for all instances together: a
set of instances is an integer's bits.  Consecutive blocks with the same holders form a *run*;
prompts have few runs, so little is done for each block.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvell.cluster.trees.chains import WHOLE, TreeGroup
from kvell.memory import GroupKind

FIRST_LOOK = 64
"""Blocks that are looked up first; more follow only if all of them are held."""


class Resumable(Protocol):
    """The rule of one layer group: which instances can resume at a length."""

    def at(self, length: int) -> int:
        """Return the instances that have all that the group needs after ``length`` tokens."""
        ...

    def edges(self, limit_tokens: int) -> Iterable[int]:
        """Return the lengths in tokens beyond which some instance may no longer resume."""
        ...


class WholeRuns:
    """A group that needs every block from the first on."""

    def __init__(self, group: TreeGroup, blocks: Sequence[int]) -> None:
        starts, holders = runs_of(blocks)
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
        self._ends.append(len(blocks))
        self._holders.append(held)

    @property
    def most_tokens(self) -> int:
        return self._ends[-1] * self._group.block_tokens if self._ends else 0

    def at(self, length: int) -> int:
        run = bisect_left(self._ends, self._group.end_block(length))
        return self._holders[run] if run < len(self._ends) else 0

    def edges(self, limit_tokens: int) -> Iterable[int]:
        return (end * self._group.block_tokens for end in self._ends)


class WindowRuns:
    """A group that needs the blocks of its window, or of its chunk."""

    def __init__(self, group: TreeGroup, blocks: Sequence[int]) -> None:
        self._group = group
        self._blocks = len(blocks)
        self._starts, self._holders = runs_of(blocks)

    def at(self, length: int) -> int:
        first = self._group.first_block(length)
        end = self._group.end_block(length)
        if end > self._blocks:
            return 0
        held = -1
        if first < end:
            begin = bisect_right(self._starts, first) - 1
            for bits in self._holders[begin : bisect_left(self._starts, end)]:
                held &= bits
        return held

    def edges(self, limit_tokens: int) -> Iterable[int]:
        # Within a run a longer prefix needs fewer old blocks, and new ones with equal holders.
        # No block is needed where a chunk ends, so beginning the next one loses nothing.
        group = self._group
        ends = [block * group.block_tokens for block in self._starts]
        if group.kind is GroupKind.CHUNKED:
            ends += range(0, limit_tokens + 1, group.window_tokens)
        return ends


class States:
    """A group that needs a state exactly at the length.

    :param blocks: the instances that have a state at the end of each block.
    """

    def __init__(self, group: TreeGroup, blocks: Sequence[int]) -> None:
        size = group.block_tokens
        self._held = {(i + 1) * size: bits for i, bits in enumerate(blocks) if bits}

    def at(self, length: int) -> int:
        return self._held.get(length, 0)

    def edges(self, limit_tokens: int) -> Iterable[int]:
        return self._held


def resumable(group: TreeGroup, blocks: Sequence[int]) -> Resumable:
    """Return the rule of a group's kind.

    :param blocks: the holders of each block from the first on, as bits.
    """
    if group.kind in WHOLE:
        return WholeRuns(group, blocks)
    return States(group, blocks) if group.kind is GroupKind.STATE else WindowRuns(group, blocks)


def longest(
    rules: Sequence[Resumable], limit_tokens: int, alignment_tokens: int, live: int
) -> list[tuple[int, int]]:
    """Return how far instances can resume: (length in tokens, their bits), the longest first.

    Every instance is in at most one entry.  Lengths are whole blocks of all groups, or the limit
    itself, since a block that is cached as a whole also serves a request that needs its beginning.
    """
    edges = {limit_tokens}
    for rule in rules:
        edges.update(rule.edges(limit_tokens))
    step = alignment_tokens
    lengths = {min(edge, limit_tokens) // step * step for edge in edges} | {limit_tokens}
    left = live
    reached = []
    for length in sorted(lengths, reverse=True):
        if length <= 0:
            break
        can = left
        for rule in rules:
            can &= rule.at(length)
            if not can:
                break
        else:
            reached.append((length, can))
            left ^= can
            if not left:
                break
    return reached


def runs_of(blocks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the first block of each run of blocks with equal holders, and the holders."""
    starts: list[int] = []
    holders: list[int] = []
    before: int | None = None
    for index, bits in enumerate(blocks):
        if bits is not before and bits != before:
            starts.append(index)
            holders.append(bits)
            before = bits
    return starts, holders
