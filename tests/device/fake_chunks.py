"""Chunks for tests: small, countable, and able to fail at each edge."""

from contextlib import suppress
from typing import Literal

import numpy as np

from kvell.device.chunks import (
    NOT_MAPPED,
    AddressRange,
    Ints,
    check_map,
    check_unmap,
    find_uncommitted,
)
from kvell.errors import TryLater

Edge = Literal["commit", "reserve", "map", "unmap"]
EDGES: tuple[Edge, ...] = ("commit", "reserve", "map", "unmap")

_FIRST_ADDRESS = 1 << 40
"""Addresses of the fake are names: they have no memory."""


class FakeChunks:
    """:class:`kvell.device.chunks.ChunkDevice` whose bytes are read and written by position.

    :param has_bytes: False keeps mappings only, for pools as large as a simulated device's.
    :ivar calls: chunks done so far (ranges, for ``reserve``), by edge.
    """

    def __init__(self, num_chunks: int, chunk_bytes: int = 4096, *, has_bytes: bool = True) -> None:
        self.num_chunks = num_chunks
        self.chunk_bytes = chunk_bytes
        self.calls: dict[Edge, int] = dict.fromkeys(EDGES, 0)
        self._failures: dict[Edge, int] = {}
        self._chunks = [bytearray() for _ in range(num_chunks)]
        self._next_address = _FIRST_ADDRESS
        self._kept_bytes = chunk_bytes if has_bytes else 0
        self._open = True
        self.home = self._range(num_chunks)

    def fail(self, edge: Edge, after: int = 0) -> None:
        """Let an edge fail once, after ``after`` more chunks (ranges, for ``reserve``)."""
        self._failures[edge] = self.calls[edge] + after

    def heal(self) -> None:
        """Cancel the failures that are still due."""
        self._failures.clear()

    def commit(self, chunks: Ints) -> None:
        self._require_open()
        for chunk in find_uncommitted(self.home, chunks).tolist():
            self._pass("commit")
            self._chunks[chunk] = bytearray(self._kept_bytes)
            self.home.table[chunk] = chunk

    def reserve(self, num_positions: int) -> AddressRange:
        self._require_open()
        self._pass("reserve")
        return self._range(num_positions)

    def map(self, area: AddressRange, positions: Ints, chunks: Ints) -> None:
        self._require_open()
        check_map(self.home, area, positions, chunks)
        for _ in range(len(positions)):
            self._pass("map")
        area.table[positions] = chunks

    def unmap(self, area: AddressRange, positions: Ints) -> int:
        self._require_open()
        check_unmap(self.home, area, positions)
        done = 0
        with suppress(TryLater):
            while done < len(positions):
                self._pass("unmap")
                done += 1
        area.table[positions[:done]] = NOT_MAPPED
        return done

    def load(self, area: AddressRange, position: int, size: int, offset: int = 0) -> bytes:
        """Return bytes of a mapped position.

        :raises ValueError: if nothing is mapped there: hardware would fault.
        """
        area.check_mapped(np.asarray([position], np.int32))
        return bytes(self._chunks[int(area.table[position])][offset : offset + size])

    def store(self, area: AddressRange, position: int, data: bytes, offset: int = 0) -> None:
        """Write into a mapped position; every alias sees it.

        :raises ValueError: as :meth:`load`.
        """
        area.check_mapped(np.asarray([position], np.int32))
        self._chunks[int(area.table[position])][offset : offset + len(data)] = data

    def close(self) -> None:
        self._open = False

    def _range(self, num_positions: int) -> AddressRange:
        area = AddressRange(self._next_address, num_positions, self.chunk_bytes)
        self._next_address += area.size_bytes
        return area

    def _pass(self, edge: Edge) -> None:
        if self._failures.get(edge, -1) == self.calls[edge]:
            del self._failures[edge]
            raise TryLater(f"device: injected failure ({edge})")
        self.calls[edge] += 1

    def _require_open(self) -> None:
        if not self._open:
            raise ValueError("the device is closed")
