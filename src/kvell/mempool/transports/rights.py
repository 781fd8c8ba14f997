"""Who may read which of an instance's pages at this moment.

A small table, which peers of the same host map read-only, has a word for each transfer and each
loan.  The word holds its number while its receiver may read.  The owner clears it *before* it gives
the pages to others, and a reader looks at it after its copy: a process that was stopped in the
middle, and wakes when it has long been given up, finds that its right is gone.

A peer on the same host can read all of the memory that it maps, so the table only tells it what
counts.  Over TCP the owner sends the pages itself, and sends a receiver what was offered to it
and nothing else.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvell.mempool.transfers.numbers import SLOTS

TABLE_BYTES = 8 * SLOTS
Extent = tuple[int, int]
"""Offset and size in bytes."""


@dataclass(frozen=True, eq=False)
class _Granted:
    """What one transfer's receiver may read; any instance, if it names none.

    :ivar begins: int64 [n], where the extents begin, in order; ``ends``, where they end.
    """

    receiver: str
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def covers(self, extents: Sequence[Extent]) -> bool:
        """Whether each of some extents lies inside one of these."""
        wanted = np.asarray(extents, np.int64).reshape(-1, 2)
        places = np.searchsorted(self.begins, wanted[:, 0], side="right") - 1
        if not len(self.begins) or (places < 0).any():
            return not len(wanted)
        return bool((wanted.sum(axis=1) <= self.ends[places]).all())


class Rights:
    """The owner's side; other threads may ask what :meth:`covers` says."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("kvell-rights", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, TABLE_BYTES)
        self._map = mmap.mmap(self.descriptor, TABLE_BYTES)
        self._words = np.frombuffer(self._map, np.uint64)
        self._granted: dict[int, _Granted] = {}

    @property
    def words(self) -> npt.NDArray[np.uint64]:
        """The table: the word at a number's remainder holds it while its receiver may read.

        Whoever keeps it lets go before :meth:`close`.
        """
        return self._words

    def grant(self, number: int, receiver: str, extents: Sequence[Extent]) -> None:
        """Let a transfer's receiver read, unless its word belongs to another transfer.

        :param number: of the transfer; 1 or more, since 0 is what an empty word holds.
        :param receiver: an instance; "": any of the cluster.
        :param extents: of the pages that were offered to it, in order and apart from each other.
        """
        if number < 1:
            raise ValueError(f"{number} is no transfer's number")
        if not self._words[number % SLOTS]:
            spans = np.asarray(extents, np.int64).reshape(-1, 2)
            self._granted[number] = _Granted(receiver, spans[:, 0].copy(), spans.sum(axis=1))
            self._words[number % SLOTS] = number

    def revoke(self, number: int) -> None:
        """Let it read no longer."""
        if self._granted.pop(number, None) is not None:
            self._words[number % SLOTS] = 0

    def stands(self, number: int) -> bool:
        """Whether a transfer's receiver may read now."""
        return number in self._granted

    def covers(self, number: int, receiver: str, extents: Sequence[Extent]) -> bool:
        """Whether a peer may read these extents now: they were offered to it in this transfer."""
        granted = self._granted.get(number)
        if granted is None or granted.receiver not in ("", receiver):
            return False
        return granted.covers(extents)

    def close(self) -> None:
        """Let go of the table; readers that have it mapped find every right gone."""
        self._granted.clear()
        self._words[:] = 0
        del self._words
        self._map.close()
        os.close(self.descriptor)


class RightsOfPeer:
    """A reader's side.

    :param descriptor: of the peer's table; it stays the caller's.
    """

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, TABLE_BYTES, prot=mmap.PROT_READ)
        self._words = np.frombuffer(self._map, np.uint64)

    def stands(self, number: int) -> bool:
        """Whether a transfer's receiver may read now; an empty word is nobody's right."""
        return bool(number and self._words[number % SLOTS] == number)

    def close(self) -> None:
        """Unmap the table."""
        del self._words
        self._map.close()
