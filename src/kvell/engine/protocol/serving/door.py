"""Where the fronts of an instance come in, on several machines.

::

    keeper ── stdin: the secret ──► instance ── stdout: where it listens ──► keeper
                                        ▲
    fronts, manager ── connect ─────────┘  both prove that they know the secret
      keeper ── stdin ends ──► the instance hangs up on all, and ends

The keeper keeps the other end of stdin open.  So an instance does not outlive it, however it ends.
"""

import contextlib
import os
import socket
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from kvell.engine.protocol.serving.gate import NAME_END
from kvell.frames import ProtocolError
from kvell.mempool.door import GREETERS, MOST_STRANGERS
from kvell.mempool.place import SECRET_BYTES
from kvell.mempool.transports.endpoints import endpoint_of, keep, listen_at, tcp_endpoint
from kvell.mempool.transports.greeting import Greeting
from kvell.mempool.transports.tcp.challenge import answer_session, check_secret
from kvell.mempool.transports.tcp.channel import Channel

LEASH_BYTES = 4096
PAUSE_SECONDS = 0.05
"""After a connection that could not be accepted."""


def read_secret(descriptor: int) -> bytes:
    """Read the cluster's secret, the first ``SECRET_BYTES`` of a pipe.

    :raises ProtocolError: when the pipe ends before.
    """
    found = b""
    while len(found) < SECRET_BYTES:
        piece = os.read(descriptor, SECRET_BYTES - len(found))
        if not piece:
            raise ProtocolError(f"the secret has {len(found)} of {SECRET_BYTES} bytes")
        found += piece
    return found


class FrontDoor:
    """Listens from the start; who has proved to know the secret waits until the loop takes it.

    :param host: address of this machine, at which fronts reach it.
    :param secret: of the cluster.
    :param instance: name and ``incarnation`` that fronts are told.
    :raises ChangeSomething: when the address cannot be bound, or the secret is too short.
    :ivar address: like ``tcp://10.0.0.1:5000``.
    """

    def __init__(self, host: str, secret: bytes, instance: str, incarnation: int) -> None:
        check_secret(secret)
        self._secret = secret
        self._told = Greeting(instance, incarnation, "", 0)
        self._listener = listen_at(tcp_endpoint(host, 0))
        self._listener.setblocking(True)  # it is accepted from in a thread
        self.address = str(endpoint_of(self._listener))
        self._arrived: deque[tuple[str, socket.socket]] = deque()
        self._bell, self._rings = socket.socketpair()
        self._bell.setblocking(False)
        self._rings.setblocking(False)
        self._strangers: set[socket.socket] = set()
        self._greeters = ThreadPoolExecutor(GREETERS, thread_name_prefix="kvell-front-door")
        self._is_open, self.is_over = True, False
        self._accepting = threading.Thread(target=self._accept, name="kvell-door", daemon=True)
        self._accepting.start()

    def __enter__(self) -> "FrontDoor":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def descriptor(self) -> int:
        """Becomes readable when somebody has come in, or all is over."""
        return self._bell.fileno()

    def arrivals(self) -> list[tuple[str, socket.socket]]:
        """Who has come in since the last call: names, and their connections."""
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(LEASH_BYTES):
                pass
        found = []
        while self._arrived:
            found.append(self._arrived.popleft())
        return found

    def ends_with(self, descriptor: int) -> threading.Thread:
        """Set :attr:`is_over` when a pipe ends, which the process at its other end holds."""

        def wait() -> None:
            with contextlib.suppress(OSError):
                while os.read(descriptor, LEASH_BYTES):
                    pass  # nothing more is said there
            self.is_over = True
            self._ring()

        thread = threading.Thread(target=wait, name="kvell-leash", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_open = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._accepting.join()
        self._listener.close()
        for sock in list(self._strangers):
            with contextlib.suppress(OSError):  # it has ended
                sock.shutdown(socket.SHUT_RDWR)
        self._greeters.shutdown()
        for _, sock in self.arrivals():
            sock.close()
        self._bell.close()
        self._rings.close()

    def _accept(self) -> None:
        pause = threading.Event()
        while self._is_open:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                pause.wait(PAUSE_SECONDS)  # it hung up, or there are no descriptors, or we close
                continue
            if len(self._strangers) >= MOST_STRANGERS:
                sock.close()
                continue
            self._strangers.add(sock)
            self._greeters.submit(self._let_in, sock)

    def _let_in(self, sock: socket.socket) -> None:
        try:
            keep(sock)
            _, heard = answer_session(Channel(sock), self._told, self._secret, ("commands",))
            if not heard.instance or NAME_END in heard.instance:
                raise ProtocolError("a front's name must be a word")
        except (OSError, ProtocolError):
            sock.close()
            return
        finally:
            self._strangers.discard(sock)
        self._arrived.append((heard.instance, sock))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it rings already, or the door is closed
            self._rings.send(b"r")
