"""The answering side of connections of one purpose: each is served on a thread of its own."""

import contextlib
import threading
from collections.abc import Callable

from kvell.wire.blocking import BlockingSocket
from kvell.wire.frames import ProtocolError

MOST_PEERS = 64
"""Connections of one purpose; further ones are not served."""

Answer = Callable[[str, BlockingSocket], None]
"""Answers the next request of an instance, which has begun to come; bounded in time."""


class ServedPeers:
    """Answers peers until they hang up, or until :meth:`close` has returned.

    :param answer: is called again and again, on the connection's thread.
    :param name: of the threads.
    """

    def __init__(self, answer: Answer, name: str) -> None:
        self._answer, self._name = answer, name
        self._lock = threading.Lock()
        self._served: dict[str, BlockingSocket] = {}
        self._threads: dict[BlockingSocket, threading.Thread] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._threads)

    def answer_peer(self, instance: str, channel: BlockingSocket) -> None:
        """Answer a peer until it hangs up; a connection that it had before ends."""
        thread = threading.Thread(
            target=self._run, args=(instance, channel), name=self._name, daemon=True
        )
        with self._lock:
            if self._is_closed or len(self._threads) >= MOST_PEERS:
                channel.close()
                return
            if instance in self._served:
                self._served[instance].hang_up()
            self._served[instance] = channel
            self._threads[channel] = thread
            thread.start()

    def close(self) -> None:
        """Hang up, and wait until nothing is answered any more."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads.values())
            for channel in self._threads:
                channel.hang_up()
        for thread in threads:
            thread.join()

    def _run(self, instance: str, channel: BlockingSocket) -> None:
        try:
            with contextlib.suppress(OSError, ProtocolError):  # the peer sees that it ended
                while True:
                    channel.wait()
                    self._answer(instance, channel)
        finally:
            with self._lock:
                del self._threads[channel]
                if self._served.get(instance) is channel:
                    del self._served[instance]
            channel.close()
