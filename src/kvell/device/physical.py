"""The interface of a device: one range of physical memory, counted in chunks."""

from mmap import mmap
from typing import Protocol

HostBuffer = mmap | bytearray


class PhysicalPool(Protocol):
    """A range of physical memory with a fixed address while it is open.

    ::

        OPEN ──close──► CLOSED     (closing twice is harmless)
    """

    chunk_bytes: int
    """Unit of mapping; the range is a whole number of chunks."""

    size_bytes: int

    def buffer(self) -> HostBuffer:
        """Return the range as writable memory.

        :raises ValueError: once closed.
        """
        ...

    def close(self) -> None:
        """Free the memory; the buffer must not be in use."""
        ...
