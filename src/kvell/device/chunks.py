"""Physical chunks and their mappings: the common interface of host, CUDA and the fake of the tests.

A chunk::

    BARE ──commit──► COMMITTED: at home, and mapped at no, one or several further positions
                         position of a range:  FREE ──map──► MAPPED ──unmap──► FREE

Every committed chunk ``c`` stays at position ``c`` of the *home* range until the device is closed.
Other ranges are reserved addresses; any committed chunk may be mapped at any free position, so one
chunk may be seen through several addresses (aliases). On a GPU aliases are coherent only between
kernels in stream order: let a step that wrote through one end before another is read.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

NOT_MAPPED = -1


class AddressRange:
    """Reserved addresses in whole chunks, and the chunk at each position.

    :ivar address: of position 0, a multiple of the chunk's size.
    :ivar table: int32 [num_positions], the chunk there or ``NOT_MAPPED``; only the device that
        reserved the range writes it.
    """

    def __init__(self, address: int, num_positions: int, chunk_bytes: int) -> None:
        self.address = address
        self.num_positions = num_positions
        self.chunk_bytes = chunk_bytes
        self.table: Ints = np.full(num_positions, NOT_MAPPED, np.int32)

    @property
    def size_bytes(self) -> int:
        return self.num_positions * self.chunk_bytes

    def check_free(self, positions: Ints) -> None:
        """Raise ValueError unless all positions are of the range, different and free."""
        self._check(positions)
        if (self.table[positions] != NOT_MAPPED).any():
            raise ValueError("a position is mapped already")

    def check_mapped(self, positions: Ints) -> None:
        self._check(positions)
        if (self.table[positions] == NOT_MAPPED).any():
            raise ValueError("a position is not mapped")

    def _check(self, positions: Ints) -> None:
        check_ids(positions, self.num_positions, "position")
        if len(np.unique(positions)) != len(positions):
            raise ValueError("a position is named twice")


class ChunkDevice(Protocol):
    """One pool of physical chunks. Arrays are int32 [n], contiguous.

    Misuse raises ValueError before anything has changed. A refusal of the system raises
    :class:`kvell.errors.TryLater`.
    """

    chunk_bytes: int
    num_chunks: int

    home: AddressRange
    """Range whose position ``c`` is chunk ``c``, once committed."""

    def commit(self, chunks: Ints) -> None:
        """Give chunks memory; those that have memory keep it.

        :raises TryLater: if there is no more; earlier chunks are committed, as ``home.table``
            shows.
        """
        ...

    def reserve(self, num_positions: int) -> AddressRange:
        """Reserve further addresses, all free.

        :raises TryLater: if the system refuses; nothing has changed.
        """
        ...

    def map(self, area: AddressRange, positions: Ints, chunks: Ints) -> None:
        """Map committed ``chunks[i]`` at free ``positions[i]`` of a reserved range.

        :raises TryLater: if the system refuses; nothing has changed.
        """
        ...

    def unmap(self, area: AddressRange, positions: Ints) -> int:
        """Free mapped positions in their order; return how many before the system refused.

        They must not be in use. A refused position stays mapped; the call may be repeated for it.
        """
        ...

    def close(self) -> None:
        """Free all memory and addresses, which must not be in use. Closing twice is harmless."""
        ...


def check_ids(ids: Ints, count: int, what: str) -> None:
    """Raise ValueError unless all of ``ids`` are from 0 to ``count`` - 1."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise ValueError(f"there is no such {what}: they are 0 to {count - 1}")


def check_map(home: AddressRange, area: AddressRange, positions: Ints, chunks: Ints) -> None:
    if area is home:
        raise ValueError("chunks have their own positions from their commit on")
    if len(positions) != len(chunks):
        raise ValueError(f"{len(positions)} positions for {len(chunks)} chunks")
    area.check_free(positions)
    check_ids(chunks, home.num_positions, "chunk")
    if (home.table[chunks] == NOT_MAPPED).any():
        raise ValueError("a chunk has no memory yet")


def check_unmap(home: AddressRange, area: AddressRange, positions: Ints) -> None:
    if area is home:
        raise ValueError("chunks cannot move on this device")
    area.check_mapped(positions)


def find_uncommitted(home: AddressRange, chunks: Ints) -> Ints:
    """Return those of ``chunks`` that have no memory yet, each once, in their order.

    :raises ValueError: for a chunk that does not exist.
    """
    check_ids(chunks, home.num_positions, "chunk")
    bare = chunks[home.table[chunks] == NOT_MAPPED]
    _, first = np.unique(bare, return_index=True)
    ordered: Ints = bare[np.sort(first)]
    return ordered
