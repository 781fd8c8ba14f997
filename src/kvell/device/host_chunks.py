"""Chunks of host memory: one memfd, huge pages, mapped in batches.

A chunk gets its memory once, as one huge page if the system can (MADV_COLLAPSE, Linux 6.1, no
privileges): a further mapping then costs one page-table entry instead of 512, and its first touch
one fault. The figures are in ADR 10.
"""

import ctypes
import os

import numpy as np

from kvell.device import _host
from kvell.device.chunks import (
    NOT_MAPPED,
    AddressRange,
    Ints,
    check_map,
    check_unmap,
    find_uncommitted,
)
from kvell.device.host import CHUNK_BYTES
from kvell.errors import ChangeSomething, TryLater


class HostChunks:
    """:class:`kvell.device.chunks.ChunkDevice` over a memfd.

    :ivar descriptor: of the memfd: another process may map chunk ``c`` at offset
        ``c × chunk_bytes``.
    :ivar num_huge: committed chunks that are one huge page.
    """

    chunk_bytes = CHUNK_BYTES
    _open = False

    def __init__(self, num_chunks: int, flag: str = "--memory", beyond_bytes: int = 0) -> None:
        """Reserve addresses for ``num_chunks``, without memory; a first touch adds small pages.

        :param beyond_bytes: addresses right after home, for the memory of other owners: see
            :class:`kvell.mempool.transports.neighbours.MappedPeers`.
        :raises ChangeSomething: if the system refuses that number.
        """
        self.num_chunks = num_chunks
        self.beyond_bytes = beyond_bytes
        self.num_huge = 0
        self._reserved: list[tuple[int, int]] = []
        self.descriptor = os.memfd_create("kvell-chunks", os.MFD_CLOEXEC)
        self._open = True
        try:
            os.ftruncate(self.descriptor, num_chunks * CHUNK_BYTES)
            address = self._reserve(num_chunks * CHUNK_BYTES + beyond_bytes)
            self.home = AddressRange(address, num_chunks, CHUNK_BYTES)
            self._map(self.home, _all(num_chunks), _all(num_chunks), populate=False)
        except (OSError, OverflowError, TryLater) as error:
            self.close()
            raise ChangeSomething(
                flag,
                f"{num_chunks * CHUNK_BYTES}B",
                f"cannot be mapped ({error})",
                "use a smaller size",
            ) from error

    def commit(self, chunks: Ints) -> None:
        self._require_open()
        bare = np.ascontiguousarray(find_uncommitted(self.home, chunks), np.int32)
        done, huge, error = _host.commit_chunks(
            self.home.address, CHUNK_BYTES, bare.ctypes.data, len(bare)
        )
        self.home.table[bare[:done]] = bare[:done]
        self.num_huge += huge
        if error:
            raise TryLater(f"device: no memory for a chunk ({os.strerror(error)})")

    def reserve(self, num_positions: int) -> AddressRange:
        self._require_open()
        return AddressRange(self._reserve(num_positions * CHUNK_BYTES), num_positions, CHUNK_BYTES)

    def map(
        self, area: AddressRange, positions: Ints, chunks: Ints, *, populate: bool = False
    ) -> None:
        """Implement :meth:`ChunkDevice.map`.

        :param populate: make the entries of the page table now, not at the first touch.
        """
        self._require_open()
        check_map(self.home, area, positions, chunks)
        self._map(area, positions, chunks, populate=populate)
        area.table[positions] = chunks

    def unmap(self, area: AddressRange, positions: Ints) -> int:
        self._require_open()
        check_unmap(self.home, area, positions)
        done = self._unmap(area, positions)
        area.table[positions[:done]] = NOT_MAPPED
        return done

    def view(self, area: AddressRange) -> memoryview:
        """Return the range as writable bytes: touching a free position ends the process.

        No view may be used once the device is closed; a view keeps an unclosed device alive.
        """
        self._require_open()
        return self._view(area.address, area.size_bytes)

    def view_beyond(self) -> memoryview:
        """Return home and the addresses after it as bytes.

        The memory of other owners is read-only; touching an unmapped address ends the process.
        """
        self._require_open()
        return self._view(self.home.address, self.home.size_bytes + self.beyond_bytes)

    def extend(self, num_chunks: int) -> None:
        """Extend the memfd by chunks that are mapped right after home, as they are in the file.

        A first touch commits their memory.

        :raises ValueError: if there are not enough addresses after home.
        :raises TryLater: if the system refuses.
        """
        address = self._beyond(self.home.size_bytes, num_chunks * CHUNK_BYTES)
        try:
            os.ftruncate(self.descriptor, (self.num_chunks + num_chunks) * CHUNK_BYTES)
        except OSError as error:
            raise TryLater(f"device: cannot extend the memory file ({error})") from error
        area = AddressRange(address, num_chunks, CHUNK_BYTES)
        chunks = _all(num_chunks) + np.int32(self.num_chunks)
        self._map(area, _all(num_chunks), chunks, populate=False)

    def map_beyond(self, at_bytes: int, descriptor: int, size_bytes: int) -> None:
        """Map another file read-only after home, ``at_bytes`` from its beginning.

        :raises ValueError: if that is not after home.
        :raises TryLater: if the system refuses; nothing has changed.
        """
        error = _host.map_readable(self._beyond(at_bytes, size_bytes), descriptor, size_bytes)
        if error:
            raise TryLater(f"device: cannot map a peer's memory ({os.strerror(error)})")

    def unmap_beyond(self, at_bytes: int, size_bytes: int) -> bool:
        """Unmap addresses after home; return False if the system refused.

        They stay reserved: the system puts nothing else there.
        """
        return not _host.unmap_range(self._beyond(at_bytes, size_bytes), size_bytes)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        for address, size_bytes in self._reserved:
            _host.release(address, size_bytes)
        os.close(self.descriptor)

    __del__ = close

    def _beyond(self, at_bytes: int, size_bytes: int) -> int:
        self._require_open()
        end_bytes = self.home.size_bytes + self.beyond_bytes
        if not self.home.size_bytes <= at_bytes <= at_bytes + size_bytes <= end_bytes:
            raise ValueError(f"{size_bytes} bytes at {at_bytes} are not after the home range")
        return self.home.address + at_bytes

    def _reserve(self, size_bytes: int) -> int:
        address, error = _host.reserve(size_bytes, CHUNK_BYTES)
        if error:
            raise TryLater(f"device: no addresses left ({os.strerror(error)})")
        self._reserved.append((address, size_bytes))
        return int(address)

    def _view(self, address: int, size_bytes: int) -> memoryview:
        raw = (ctypes.c_uint8 * size_bytes).from_address(address)
        raw.device = self  # type: ignore[attr-defined]
        return memoryview(raw).cast("B")

    def _map(self, area: AddressRange, positions: Ints, chunks: Ints, *, populate: bool) -> None:
        done, error = _host.map_chunks(
            area.address,
            self.descriptor,
            CHUNK_BYTES,
            positions.ctypes.data,
            chunks.ctypes.data,
            len(positions),
            populate,
        )
        if error:
            self._unmap(area, positions[:done])
            raise TryLater(f"device: cannot map a chunk ({os.strerror(error)})")

    def _unmap(self, area: AddressRange, positions: Ints) -> int:
        address = area.address
        count = len(positions)
        done, _ = _host.unmap_chunks(address, CHUNK_BYTES, positions.ctypes.data, count)
        return int(done)

    def _require_open(self) -> None:
        if not self._open:
            raise ValueError("the device is closed")


def _all(count: int) -> Ints:
    return np.arange(count, dtype=np.int32)
