"""Block hash → the instances that hold the block, as bits of an integer.

Entries age in two generations.  New entries are in the young one; when a generation ends, the young
one becomes old, and the entries of the old one are dropped.  So an entry needs no time of its own.

Most blocks have the same holders as the block before, so equal bits are mostly one object.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

_NOBODY = repeat(0)
Holders = dict[int, int]
"""Block hash → bits."""


class HolderMap:
    """The holders of the blocks of one layer group.

    A block that is added or looked up again becomes young again; without that it is kept for one
    generation at least, and two at most.

    :ivar turns: number of generations that have ended.
    """

    def __init__(self) -> None:
        self._young: Holders = {}
        self._old: Holders = {}
        self._live = -1
        self.turns = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def young_blocks(self) -> int:
        return len(self._young)

    def add(self, hashes: Sequence[int], bit: int) -> None:
        if self._old:
            self.find(hashes)
        _add(self._young, hashes, bit)

    def remove(self, hashes: Sequence[int], bit: int) -> None:
        """Remove a holder of the blocks; blocks that it does not hold stay as they are."""
        _remove(self._young, hashes, bit)
        _remove(self._old, hashes, bit)

    def find(self, hashes: Sequence[int]) -> list[int]:
        """Return the holders of each block, 0 without any, and renew the blocks."""
        held = list(map(self._young.get, hashes, _NOBODY))
        if self._old and not all(held):
            take, live = self._old.pop, self._live
            for index, bits in enumerate(held):
                if not bits and (bits := take(hashes[index], 0) & live):
                    held[index] = self._young[hashes[index]] = bits
        return held

    def turn(self, live: int) -> None:
        """End a generation.

        :param live: bits in use; the others are dropped from blocks that are renewed.  After two
            turns no block has a bit that was not in use at the first.
        """
        self._old, self._young = self._young, {}
        self._live = live
        self.turns += 1

    def clear_bits(self, live: int) -> None:
        self._young, self._old = _cleared(self._young, live), _cleared(self._old, live)

    def items(self) -> Iterator[tuple[int, int]]:
        return chain(self._young.items(), self._old.items())


class GuessMap:
    """The expected holders of the blocks of one layer group.

    Nothing renews a guess, which is kept for one generation at least, and two at most.

    :ivar turns: number of generations that have ended.
    """

    def __init__(self) -> None:
        self._young: Holders = {}
        self._old: Holders = {}
        self.turns = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, hashes: Sequence[int], bit: int) -> None:
        _add(self._young, hashes, bit)

    def remove(self, hashes: Sequence[int], bit: int) -> None:
        _remove(self._young, hashes, bit)
        _remove(self._old, hashes, bit)

    def added_to(self, held: list[int], hashes: Sequence[int]) -> list[int]:
        """Return the holders of each block, with the expected ones.

        :param held: the holders of each block.
        """
        for generation in (self._young, self._old):
            if generation and not generation.keys().isdisjoint(hashes):
                guessed = map(generation.get, hashes, _NOBODY)
                held = [a | b if b else a for a, b in zip(held, guessed, strict=True)]
        return held

    def turn(self) -> None:
        self._old, self._young = self._young, {}
        self.turns += 1

    def clear_bits(self, live: int) -> None:
        self._young, self._old = _cleared(self._young, live), _cleared(self._old, live)

    def items(self) -> Iterator[tuple[int, int]]:
        """Return every block with its bits; a block of both generations comes twice."""
        return chain(self._young.items(), self._old.items())


def _add(holders: Holders, hashes: Sequence[int], bit: int) -> None:
    """Add a bit to blocks, with one look-up for each where possible, since large maps are slow."""
    stored = list(map(holders.setdefault, hashes, repeat(bit)))
    if stored.count(bit) == len(stored):
        return
    before, after = bit, bit
    for block_hash, bits in zip(hashes, stored, strict=True):
        if bits != before:
            before = bits
            after = bits | bit
        if after is not bits:
            holders[block_hash] = after


def _remove(holders: Holders, hashes: Sequence[int], bit: int) -> None:
    if not holders:
        return
    popped = list(map(holders.pop, hashes, _NOBODY))
    if popped.count(bit) + popped.count(0) == len(popped):
        return
    before = bit
    after = 0
    for block_hash, bits in zip(hashes, popped, strict=True):
        if bits != before:
            before = bits
            after = bits & ~bit
        if after:
            holders[block_hash] = after


def _cleared(holders: Holders, live: int) -> Holders:
    return {block_hash: kept for block_hash, bits in holders.items() if (kept := bits & live)}
