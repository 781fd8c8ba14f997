"""Memory for weights: this process's own, or a file that several processes map."""

import ctypes
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvell.device import _host
from kvell.device.host import CHUNK_BYTES
from kvell.errors import TryLater

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class WeightPiece:
    """A piece of memory for weights.

    :param memory: at least the requested number of bytes; it lives as long as a view of it.
    :param is_filled: the weights are there already, and writing to it ends the process.
    """

    memory: Any
    is_filled: bool = False


class WeightMemory(Protocol):
    """An allocator of memory for the weights of one model; not for concurrent use."""

    is_shared: bool
    """Whether other processes map its pieces."""

    def take(self, what: str, size_bytes: int) -> WeightPiece:
        """Return the next piece.

        :param what: describes the weights and their layout; pieces of one description are equal.
        :raises TryLater: if there is no memory for it.
        """
        ...


class PrivateWeights:
    """Anonymous memory, in huge pages if the system has any."""

    is_shared = False

    def take(self, what: str, size_bytes: int) -> WeightPiece:
        made = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            made.madvise(mmap.MADV_HUGEPAGE)
        return WeightPiece(made)


def map_file(descriptor: int, offset_bytes: int, size_bytes: int, *, fill: bool) -> Any:
    """Map a part of a memory file at an address that huge pages need; return it as a buffer.

    The descriptor is not duplicated, as ``mmap.mmap`` would do: closing the copy would free this
    process's locks of the file.

    :param offset_bytes: a multiple of ``CHUNK_BYTES``.
    :param fill: give it memory, in huge pages if possible, and leave it writable until
        :func:`protect`; otherwise the memory is there, and read-only.
    :raises TryLater: if there is no memory, or there are no addresses.
    """
    count = max(-(-size_bytes // CHUNK_BYTES), 1)
    address, error = _host.reserve(count * CHUNK_BYTES, CHUNK_BYTES)
    _require(error)
    made = (ctypes.c_uint8 * (count * CHUNK_BYTES)).from_address(address)
    # Not at exit: a thread may still compute.
    weakref.finalize(made, _host.release, address, count * CHUNK_BYTES).atexit = False
    positions = np.arange(count, dtype=np.int32)
    chunks = positions + np.int32(offset_bytes // CHUNK_BYTES)
    _, error = _host.map_chunks(
        address,
        descriptor,
        CHUNK_BYTES,
        positions.ctypes.data,
        chunks.ctypes.data,
        count,
        False,
    )
    _require(error)
    if fill:
        _, _, error = _host.commit_chunks(address, CHUNK_BYTES, positions.ctypes.data, count)
        _require(error)
    else:
        protect(made)
    return made


def protect(mapped: Any) -> None:
    if _LIBC.mprotect(ctypes.addressof(mapped), ctypes.sizeof(mapped), mmap.PROT_READ):
        raise OSError(ctypes.get_errno(), "weights cannot be made read-only")


def _require(error: int) -> None:
    if error:
        raise TryLater(f"device: no memory for shared weights ({os.strerror(error)})")
