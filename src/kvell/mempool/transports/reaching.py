"""Connections to instances that messages are for and that are not connected yet."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvell.errors import ChangeSomething, TryLater
from kvell.mempool.transfers.actions import Send
from kvell.wire.endpoints import Endpoint

THREADS = 4


class PeerFinder:
    """The messages that wait for a connection, and the threads that connect.

    :param find: returns the address of an instance by its name.
    :param connect: connects to an instance; called on a thread of the finder, as is ``fail``.
    :param fail: called when an instance cannot be reached.
    """

    def __init__(
        self,
        find: Callable[[str], Endpoint],
        connect: Callable[[Endpoint, str], object],
        fail: Callable[[str], None],
    ) -> None:
        self._find, self._connect, self._fail = find, connect, fail
        self._waiting: dict[str, list[Send]] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvell-reacher")

    def reach(self, action: Send) -> None:
        name = action.instance
        is_new = name not in self._waiting
        self._waiting.setdefault(name, []).append(action)
        if is_new:
            self._threads.submit(self._reach, name)

    def take(self, name: str) -> Sequence[Send]:
        return self._waiting.pop(name, ())

    def close(self) -> None:
        """Wait until no thread connects any more."""
        self._threads.shutdown()

    def _reach(self, name: str) -> None:
        try:
            self._connect(self._find(name), name)
        except (ChangeSomething, TryLater, OSError):
            self._fail(name)
