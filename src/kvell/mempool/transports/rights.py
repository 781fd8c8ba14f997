"""The rights of peers to read pages of an instance.

A small table, which peers on the same host map read-only, has a word for each transfer and each
loan.  The word holds its number while its receiver may read.  The owner clears the word *before* it
reuses the pages, and a reader checks the word after its copy.  So a process that was stopped
during a copy, and wakes after it was declared dead, finds its right revoked.

A peer on the same host can read all of the mapped memory, so the table only decides which reads are
valid.  Over TCP the owner sends the pages itself, and sends a receiver only the pages that were
offered to it.
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
"""The offset and the size of some bytes of the pool."""


@dataclass(frozen=True, eq=False)
class _Granted:
    """The extents that one transfer's receiver may read.

    :ivar receiver: an instance; "": any.
    :ivar begins: the sorted begins of the extents, int64 [n]; ``ends`` are their ends.
    """

    receiver: str
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def covers(self, extents: Sequence[Extent]) -> bool:
        wanted = np.asarray(extents, np.int64).reshape(-1, 2)
        places = np.searchsorted(self.begins, wanted[:, 0], side="right") - 1
        if not len(self.begins) or (places < 0).any():
            return not len(wanted)
        return bool((wanted.sum(axis=1) <= self.ends[places]).all())


class Rights:
    """The owner's side of rights. Other threads may call :meth:`stands` and :meth:`covers`."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("kvell-rights", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, TABLE_BYTES)
        self._map = mmap.mmap(self.descriptor, TABLE_BYTES)
        self._words = np.frombuffer(self._map, np.uint64)
        self._granted: dict[int, _Granted] = {}

    @property
    def words(self) -> npt.NDArray[np.uint64]:
        """The table: the word at a number's remainder holds it while its receiver may read.

        Callers must release it before :meth:`close`.
        """
        return self._words

    def grant(self, number: int, receiver: str, extents: Sequence[Extent]) -> None:
        """Let a transfer's receiver read, unless its word belongs to another transfer.

        :param number: the number of the transfer; 1 or more, since 0 marks an empty word.
        :param receiver: an instance; "": any of the cluster.
        :param extents: the offered pages, in order and disjoint.
        """
        if number < 1:
            raise ValueError(f"{number} is not a transfer's number")
        if not self._words[number % SLOTS]:
            spans = np.asarray(extents, np.int64).reshape(-1, 2)
            self._granted[number] = _Granted(receiver, spans[:, 0].copy(), spans.sum(axis=1))
            self._words[number % SLOTS] = number

    def revoke(self, number: int) -> None:
        if self._granted.pop(number, None) is not None:
            self._words[number % SLOTS] = 0

    def stands(self, number: int) -> bool:
        return number in self._granted

    def covers(self, number: int, receiver: str, extents: Sequence[Extent]) -> bool:
        granted = self._granted.get(number)
        if granted is None or granted.receiver not in ("", receiver):
            return False
        return granted.covers(extents)

    def close(self) -> None:
        self._granted.clear()
        self._words[:] = 0
        del self._words
        self._map.close()
        os.close(self.descriptor)


class RightsOfPeer:
    """The reader's side of rights.

    :param descriptor: of the peer's table; the caller keeps it.
    """

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, TABLE_BYTES, prot=mmap.PROT_READ)
        self._words = np.frombuffer(self._map, np.uint64)

    def stands(self, number: int) -> bool:
        """Return whether a transfer's receiver may read now; an empty word grants no right."""
        return bool(number and self._words[number % SLOTS] == number)

    def close(self) -> None:
        del self._words
        self._map.close()
