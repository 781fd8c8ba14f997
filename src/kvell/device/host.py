"""Host memory: one memfd, mapped once.

A memfd rather than anonymous memory, because other processes of the same host may receive the
descriptor and map the pool read-only (MemServe's memory pool, Infinite-LLM's lending): page data
then moves without a copy through a socket.
"""

import mmap
import os

from kvell.errors import ChangeSomething
from kvell.vocabulary import MIB

CHUNK_BYTES = 2 * MIB


class HostPool:
    """A memfd of whole 2 MiB chunks; pages are committed at first touch."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, size_bytes: int, flag: str = "--kv-memory") -> None:
        """Reserve ``size_bytes``, rounded up to chunks.

        :raises ChangeSomething: if the system refuses so large a range.
        """
        self.size_bytes = -(-size_bytes // CHUNK_BYTES) * CHUNK_BYTES
        descriptor = os.memfd_create("kvell-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, self.size_bytes)
            self._map: mmap.mmap | None = mmap.mmap(descriptor, self.size_bytes)
        except (OSError, OverflowError) as error:
            os.close(descriptor)
            raise ChangeSomething(
                flag, f"{size_bytes}B", f"cannot be mapped ({error})", "use a smaller size"
            ) from error
        self.descriptor = descriptor

    def buffer(self) -> mmap.mmap:
        """Return the range as writable memory.

        :raises ValueError: once closed.
        """
        if self._map is None:
            raise ValueError("the pool is closed")
        return self._map

    def close(self) -> None:
        """Unmap the range, or leave that to the last tensor over it if there is one."""
        if self._map is None:
            return
        held, self._map = self._map, None
        os.close(self.descriptor)
        try:
            held.close()
        except BufferError:  # a view is alive, and unmaps when it dies
            return
