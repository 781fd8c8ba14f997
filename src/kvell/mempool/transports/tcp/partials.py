"""Query rows and the records that answer them, on a connection of their own.

::

    debtor's pass                              creditor
      │ ── frame: a query of one layer ────────► │  computes partials over what it lends
      │ ◄── frame: its answer ─────────────────── │  in the order of queries

What is in them the two ends of a pass know (``csrc/partials/message.h``); here they are bytes.

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
from kvell.wire.frames import FrameReader, ProtocolError, framed

ROOM_BYTES = 4 << 20
"""Of a query together with its answer; a pass cuts what it asks into such messages."""
ANSWER_SECONDS = 10.0
"""A debtor that takes longer to send a query, or to take its answer, is given up."""
MOST_UNSENT_BYTES = 2 * ROOM_BYTES
"""A creditor that leaves so much unread is asked nothing more."""
_READ_BYTES = 256 << 10

Answers = Callable[[str, bytes], bytes]
"""Computes the answer to an instance's query, whatever that is; on any thread."""


class PartialsServer:
    """Answers the queries of debtors.

    :param answers: computes an answer.
    """

    def __init__(self, answers: Answers, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._answers, self._answer_seconds = answers, answer_seconds
        self._peers = ServedPeers(self._answer, "kvell-partials")

    def answer_peer(self, instance: str, channel: BlockingSocket) -> None:
        """Answer a peer until it hangs up; a connection that it had before ends."""
        self._peers.answer_peer(instance, channel)

    def close(self) -> None:
        """Hang up, and wait until nothing is computed any more."""
        self._peers.close()

    def _answer(self, instance: str, channel: BlockingSocket) -> None:
        query = channel.hear_body(ROOM_BYTES, within(self._answer_seconds))
        answer = framed(self._answers(instance, query))
        channel.send([answer], within(self._answer_seconds))


class PartialsLine:
    """A debtor's connection to one creditor.  It connects at the first query, and again after one
    that failed; nothing but :meth:`take` waits.

    :param opens: a proven connection to the creditor, for partials.
    """

    def __init__(self, opens: Callable[[], BlockingSocket]) -> None:
        self._opens = opens
        self._lock = threading.Lock()
        self._opening: threading.Thread | None = None
        self._opened: BlockingSocket | None = None
        self._socket: socket.socket | None = None
        self._outgoing: deque[memoryview] = deque()
        self._reader = FrameReader(ROOM_BYTES)
        self._came: deque[bytes] = deque()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether the creditor is gone."""
        return self._is_closed

    def post(self, query: bytes) -> bool:
        """Send a query, or keep it until the creditor reads; whether it is under way.

        Not if too much waits already, or the connection has just failed.
        """
        unsent_bytes = sum(map(len, self._outgoing))
        if self._is_closed or unsent_bytes + len(query) > MOST_UNSENT_BYTES:
            return False
        self._outgoing.append(memoryview(framed(query)))
        return self._pumped(0.0)

    def take(self, seconds: float) -> bytes | None:
        """Return the next answer; None if none comes in time, or the connection fails.

        Answers come in the order of queries, those that nobody waited for included.
        """
        deadline = time.monotonic() + seconds
        while not self._came:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0 or not self._pumped(left_seconds):
                return None
        return self._came.popleft()

    def close(self) -> None:
        """Hang up, from any thread; a call of :meth:`take` that waits ends soon."""
        with self._lock:
            self._is_closed = True
            channel, sock = self._opened, self._socket
        if channel is not None:
            channel.close()
        if sock is not None:
            with contextlib.suppress(OSError):  # it has ended
                sock.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------------ the pass's thread

    def _pumped(self, seconds: float) -> bool:
        """Send and receive what can be, waiting so long at most; False: the connection failed."""
        try:
            sock = self._connected(seconds)
            if sock is not None:
                self._pump(sock, seconds)
        except (OSError, ProtocolError):
            self._let_go()
            return False
        return True

    def _connected(self, seconds: float) -> socket.socket | None:
        """The connection; None while it is being opened.

        :raises OSError: if it could not be.
        """
        if self._socket is not None:
            return self._socket
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
                raise OSError("it could not be connected to")
            self._socket = channel.socket
        self._socket.setblocking(False)
        return self._socket

    def _open(self) -> None:
        """Connect, on a thread of its own."""
        with contextlib.suppress(OSError, KvellError):
            channel = self._opens()
            with self._lock:
                if not self._is_closed:
                    self._opened = channel
                    return
            channel.close()

    def _pump(self, sock: socket.socket, seconds: float) -> None:
        """Wait until something can be sent or has come, and do it.

        :raises OSError: when the connection fails.
        :raises ProtocolError: when what comes is no frame.
        """
        poll = select.poll()  # no descriptor of its own: this is done for every layer of a pass
        poll.register(sock, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        for _, mask in poll.poll(1000 * seconds):
            if mask & select.POLLOUT:
                self._send(sock)
            if mask & ~select.POLLOUT:  # it has come, or the connection has ended
                self._receive(sock)

    def _send(self, sock: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                sent_bytes = sock.send(self._outgoing[0])
                if sent_bytes < len(self._outgoing[0]):
                    self._outgoing[0] = self._outgoing[0][sent_bytes:]
                else:
                    self._outgoing.popleft()

    def _receive(self, sock: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            data = sock.recv(_READ_BYTES)
            if not data:
                raise ProtocolError("the creditor hung up")
            self._came += self._reader.feed(data)

    def _let_go(self) -> None:
        """Forget the connection, with all that was under way on it."""
        with self._lock:
            sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()
        self._outgoing.clear()
        self._came.clear()
        self._reader = FrameReader(ROOM_BYTES)
