"""The answering side of connections of one purpose, each served on a separate thread."""

import contextlib
import threading
from collections.abc import Callable

from kvell.wire.blocking import BlockingSocket
from kvell.wire.frames import ProtocolError

MOST_PEERS = 64
"""The most connections of one purpose; further ones are closed."""

Answer = Callable[[str, BlockingSocket], None]
"""A function that reads and answers the next request of an instance, in bounded time."""


class ServedPeers:
    """The peers that are answered until they hang up, or until :meth:`close` has returned.

    :param answer: called repeatedly on the connection's thread.
    """

    def __init__(self, answer: Answer, name: str) -> None:
        self._answer, self._name = answer, name
        self._lock = threading.Lock()
        self._served: dict[str, BlockingSocket] = {}
        self.threads: dict[BlockingSocket, threading.Thread] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self.threads)

    def answer_peer(self, instance: str, channel: BlockingSocket) -> None:
        """Answer a peer until it hangs up, and end its earlier connection."""
        thread = threading.Thread(
            target=self._run, args=(instance, channel), name=self._name, daemon=True
        )
        with self._lock:
            if self._is_closed or len(self.threads) >= MOST_PEERS:
                channel.close()
                return
            if instance in self._served:
                self._served[instance].hang_up()
            self._served[instance] = channel
            self.threads[channel] = thread
            thread.start()

    def close(self) -> None:
        """Close all connections, and wait until no request is answered any more."""
        with self._lock:
            self._is_closed = True
            threads = list(self.threads.values())
            for channel in self.threads:
                channel.hang_up()
        for thread in threads:
            thread.join()

    def _run(self, instance: str, channel: BlockingSocket) -> None:
        try:
            with contextlib.suppress(OSError, ProtocolError):  # the peer sees the closed connection
                while True:
                    channel.wait()
                    self._answer(instance, channel)
        finally:
            with self._lock:
                del self.threads[channel]
                if self._served.get(instance) is channel:
                    del self._served[instance]
            channel.close()
