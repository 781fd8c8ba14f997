"""Who may read an instance's pages at this moment: a small table that its peers map read-only.

A transfer's word holds its number while its receiver may read.  The owner clears it *before* it
gives the pages to others, and a reader looks at it after its copy: a process that was stopped in
the middle, and wakes when it has long been given up, finds that its right is gone.
"""

import mmap
import os

import numpy as np

SLOTS = 4096
"""Transfers whose words do not meet; a later one whose word is taken is not granted."""
TABLE_BYTES = 8 * SLOTS


class Rights:
    """The owner's side."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("kvell-rights", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, TABLE_BYTES)
        self._map = mmap.mmap(self.descriptor, TABLE_BYTES)
        self._words = np.frombuffer(self._map, np.uint64)

    def grant(self, number: int) -> None:
        """Let a transfer's receiver read, unless its word belongs to another transfer."""
        if not self._words[number % SLOTS]:
            self._words[number % SLOTS] = number

    def revoke(self, number: int) -> None:
        """Let it read no longer."""
        if self._words[number % SLOTS] == number:
            self._words[number % SLOTS] = 0

    def stands(self, number: int) -> bool:
        """Whether a transfer's receiver may read now."""
        return bool(self._words[number % SLOTS] == number)

    def close(self) -> None:
        """Let go of the table; readers that have it mapped find every right gone."""
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
        """Whether a transfer's receiver may read now."""
        return bool(self._words[number % SLOTS] == number)

    def close(self) -> None:
        """Unmap the table."""
        del self._words
        self._map.close()
