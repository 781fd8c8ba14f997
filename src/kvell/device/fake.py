"""A device for tests and the simulator: counted, small, and able to fail on demand."""

from kvell.device.host import CHUNK_BYTES
from kvell.errors import TryLater


class FakePool:
    """A :class:`kvell.device.physical.PhysicalPool` of plain memory.

    :param fail_after: calls of :meth:`buffer` that succeed before one fails; None: all do.
    """

    chunk_bytes = CHUNK_BYTES

    def __init__(self, size_bytes: int, fail_after: int | None = None) -> None:
        self.size_bytes = size_bytes
        self._memory: bytearray | None = bytearray(size_bytes)
        self._fail_after = fail_after
        self.calls = 0

    def buffer(self) -> bytearray:
        """Implement :meth:`kvell.device.physical.PhysicalPool.buffer`.

        :raises TryLater: when the injected failure is due.
        """
        if self._memory is None:
            raise ValueError("the pool is closed")
        self.calls += 1
        if self._fail_after is not None and self.calls > self._fail_after:
            raise TryLater("device: injected failure")
        return self._memory

    def close(self) -> None:
        """Implement :meth:`kvell.device.physical.PhysicalPool.close`."""
        self._memory = None
