"""Block hash → the instances that hold the block, as bits of an integer.

Time passes in two generations.  What is said is in the young one; when a generation ends, the young
one becomes old and what was old is forgotten.  So an entry needs no time of its own.

Most blocks are held by as many instances as the one before, so equal bits are mostly one object.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

_NOBODY = repeat(0)
Holders = dict[int, int]
"""Block hash → bits."""


class HolderMap:
    """Who holds the blocks of one layer group.

    A block that is told or asked for again becomes young again, so one that nobody renews lives
    for one generation at least, and two at most.

    :ivar turns: generations that ended.
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
        """Blocks that were told or asked for since the generation began."""
        return len(self._young)

    def add(self, hashes: Sequence[int], bit: int) -> None:
        """One more instance holds the blocks."""
        if self._old:
            self.found(hashes)
        _add(self._young, hashes, bit)

    def remove(self, hashes: Sequence[int], bit: int) -> None:
        """The instance holds the blocks no longer; those that it did not hold stay as they are."""
        _remove(self._young, hashes, bit)
        _remove(self._old, hashes, bit)

    def found(self, hashes: Sequence[int]) -> list[int]:
        """Return for each block who holds it, 0 where nobody does, and renew them."""
        found = list(map(self._young.get, hashes, _NOBODY))
        if self._old and not all(found):
            take, live = self._old.pop, self._live
            for index, bits in enumerate(found):
                if not bits and (bits := take(hashes[index], 0) & live):
                    found[index] = self._young[hashes[index]] = bits
        return found

    def turn(self, live: int) -> None:
        """End a generation.

        :param live: bits in use; the others vanish from what is renewed.  After two turns nothing
            has a bit any more that was no longer in use at the first.
        """
        self._old, self._young = self._young, {}
        self._live = live
        self.turns += 1

    def clear_bits(self, live: int) -> None:
        """Take the bits that are not in use from all blocks at once."""
        self._young, self._old = _cleared(self._young, live), _cleared(self._old, live)

    def items(self) -> Iterator[tuple[int, int]]:
        """Every block with its bits."""
        return chain(self._young.items(), self._old.items())


class GuessMap:
    """Who will hold the blocks of one layer group soon.

    Nothing renews a guess: it lives for one generation at least, and two at most.

    :ivar turns: generations that ended.
    """

    def __init__(self) -> None:
        self._young: Holders = {}
        self._old: Holders = {}
        self.turns = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, hashes: Sequence[int], bit: int) -> None:
        """One more instance will hold the blocks."""
        _add(self._young, hashes, bit)

    def remove(self, hashes: Sequence[int], bit: int) -> None:
        """The instance does not hold the blocks."""
        _remove(self._young, hashes, bit)
        _remove(self._old, hashes, bit)

    def added_to(self, found: list[int], hashes: Sequence[int]) -> list[int]:
        """Return for each block who holds it already and who will.

        :param found: who holds them.
        """
        for generation in (self._young, self._old):
            if generation and not generation.keys().isdisjoint(hashes):
                guessed = map(generation.get, hashes, _NOBODY)
                found = [a | b if b else a for a, b in zip(found, guessed, strict=True)]
        return found

    def turn(self) -> None:
        """End a generation."""
        self._old, self._young = self._young, {}
        self.turns += 1

    def clear_bits(self, live: int) -> None:
        """Take the bits that are not in use from all blocks at once."""
        self._young, self._old = _cleared(self._young, live), _cleared(self._old, live)

    def items(self) -> Iterator[tuple[int, int]]:
        """Every block with its bits; one of both generations comes twice."""
        return chain(self._young.items(), self._old.items())


def _add(holders: Holders, hashes: Sequence[int], bit: int) -> None:
    """Large maps are slow to reach into, so each block is looked up once where that is enough."""
    found = list(map(holders.setdefault, hashes, repeat(bit)))
    if found.count(bit) == len(found):
        return
    before, after = bit, bit
    for one, known in zip(hashes, found, strict=True):
        if known != before:
            before, after = known, known | bit
        if after is not known:
            holders[one] = after


def _remove(holders: Holders, hashes: Sequence[int], bit: int) -> None:
    if not holders:
        return
    popped = list(map(holders.pop, hashes, _NOBODY))
    if popped.count(bit) + popped.count(0) == len(popped):
        return
    before, after = bit, 0
    for one, known in zip(hashes, popped, strict=True):
        if known != before:
            before, after = known, known & ~bit
        if after:
            holders[one] = after


def _cleared(holders: Holders, live: int) -> Holders:
    return {one: kept for one, bits in holders.items() if (kept := bits & live)}
