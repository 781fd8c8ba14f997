"""Query rows and the partial results that answer them, on a separate connection.

::

    debtor's pass                              creditor
      │ ── frame: a query of one layer ────────► │  computes partials over its lent pages
      │ ◄── frame: its answer ─────────────────── │  in the order of queries

Queries and answers are opaque bytes here; ``csrc/partials/message.h`` defines their content.

Source: Infinite-LLM §4.
"""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from kvell.errors import KvellError
from kvell.mempool.transports.tcp.served_peers import ServedPeers
from kvell.wire.blocking import BlockingSocket, within
from kvell.wire.buffered import BufferedSocket, PeerClosedError
from kvell.wire.frames import ProtocolError, frame

ROOM_BYTES = 4 << 20
"""The largest size of a query together with its answer; a pass splits its queries accordingly."""
ANSWER_SECONDS = 10.0
"""The time in which a debtor must send a query, or receive its answer, before the connection ends.
"""
MOST_UNSENT_BYTES = 2 * ROOM_BYTES
"""The limit of unread bytes, beyond which a creditor gets no more queries."""

Answers = Callable[[str, bytes], bytes]
"""A function that computes the answer to an instance's query, valid or not, on any thread."""


class PartialsServer(ServedPeers):
    """A server that answers the queries of debtors."""

    def __init__(self, answers: Answers, answer_seconds: float = ANSWER_SECONDS) -> None:
        super().__init__(self._answer_query, "kvell-partials")
        self._answers, self._answer_seconds = answers, answer_seconds

    def _answer_query(self, instance: str, channel: BlockingSocket) -> None:
        query = channel.hear_body(ROOM_BYTES, within(self._answer_seconds))
        answer = frame(self._answers(instance, query))
        channel.send([answer], within(self._answer_seconds))


class PartialsLine:
    """A debtor's connection to one creditor.

    It connects at the first query, and again after a failure.  Only :meth:`take` waits.

    :param opens: opens an authenticated connection to the creditor, for partials.
    """

    def __init__(self, opens: Callable[[], BlockingSocket]) -> None:
        self._opens = opens
        self._lock = threading.Lock()
        self._opening: threading.Thread | None = None
        self._opened: BlockingSocket | None = None
        self._line: BufferedSocket | None = None
        self._unsent = bytearray()
        """Queries for a connection that is not open yet."""
        self._came: deque[bytes] = deque()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def post(self, query: bytes) -> bool:
        """Send a query, or queue it until the creditor reads, and return whether it is accepted.

        It is rejected if too many bytes are queued, or the connection has just failed.
        """
        unsent_bytes = len(self._unsent) + (self._line.unsent_bytes if self._line else 0)
        if self._is_closed or unsent_bytes + len(query) > MOST_UNSENT_BYTES:
            return False
        self._unsent += frame(query)
        return self._pumped(0.0)

    def take(self, seconds: float) -> bytes | None:
        """Return the next answer, or None on a timeout or a failed connection.

        Answers arrive in the order of queries, with those for which no caller waited.
        """
        deadline = time.monotonic() + seconds
        while not self._came:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0 or not self._pumped(left_seconds):
                return None
        return self._came.popleft()

    def close(self) -> None:
        """Close the line; a waiting :meth:`take` ends soon. Any thread may call this."""
        with self._lock:
            self._is_closed = True
            channel, line = self._opened, self._line
        if channel is not None:
            channel.close()
        if line is not None:
            with contextlib.suppress(OSError):  # it is closed already
                line.socket.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------ the pass's thread

    def _pumped(self, seconds: float) -> bool:
        """Send and receive for at most ``seconds``, and return whether the connection works."""
        try:
            line = self._connected(seconds)
            if line is not None:
                self._pump(line, seconds)
        except (OSError, PeerClosedError, ProtocolError):
            self._let_go()
            return False
        return True

    def _connected(self, seconds: float) -> BufferedSocket | None:
        """Return the connection, or None while it is being opened.

        :raises OSError: if it could not be opened.
        """
        if self._line is not None:
            return self._line
        if self._opening is None:
            self._opening = threading.Thread(target=self._open, name="kvell-asks", daemon=True)
            self._opening.start()
        self._opening.join(seconds)
        if self._opening.is_alive():
            return None
        self._opening = None
        with self._lock:
            channel, self._opened = self._opened, None
            if channel is None or self._is_closed:
                raise OSError("cannot connect to it")
            self._line = BufferedSocket(channel.socket, ROOM_BYTES)
        return self._line

    def _open(self) -> None:
        with contextlib.suppress(OSError, KvellError):
            channel = self._opens()
            with self._lock:
                if not self._is_closed:
                    self._opened = channel
                    return
            channel.close()

    def _pump(self, line: BufferedSocket, seconds: float) -> None:
        """Wait until bytes can be sent or received, and transfer them.

        :raises PeerClosedError: when the connection fails.
        :raises ProtocolError: when the received bytes are no frame.
        """
        line.send(self._unsent)
        self._unsent.clear()
        poll = select.poll()  # it needs no descriptor, and runs for every layer of a pass
        poll.register(line.socket, select.POLLIN | (select.POLLOUT if line.unsent_bytes else 0))
        for _, mask in poll.poll(1000 * seconds):
            if mask & select.POLLOUT:
                line.flush()
            if mask & ~select.POLLOUT:  # bytes have arrived, or the connection has ended
                self._came += line.receive()

    def _let_go(self) -> None:
        with self._lock:
            line, self._line = self._line, None
        if line is not None:
            line.socket.close()
        self._unsent.clear()
        self._came.clear()
