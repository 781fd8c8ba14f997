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

from kvell.mempool.rendezvous import SECRET_BYTES
from kvell.serving.fronts import Arrival, ConnectedFront
from kvell.serving.gate import NAME_END
from kvell.wire.bell import Bell
from kvell.wire.doorway import Doorway
from kvell.wire.endpoints import listen_at, tcp_endpoint
from kvell.wire.frames import ProtocolError
from kvell.wire.greeting import Greeting
from kvell.wire.session import check_secret

LEASH_BYTES = 4096


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
        self._arrived: deque[Arrival] = deque()
        self._bell = Bell()
        self.is_over = False
        listener = listen_at(tcp_endpoint(host, 0))
        told = Greeting(instance, incarnation, "", 0)
        self._doorway = Doorway(listener, told, secret, {"commands": self._enters})
        self.address = str(self._doorway.address)
        self._doorway.open()

    def __enter__(self) -> "FrontDoor":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def descriptor(self) -> int:
        """Becomes readable when somebody has come in, or all is over."""
        return self._bell.descriptor

    def left(self, front: ConnectedFront) -> None:
        """See :class:`.Arrivals`; other fronts may come."""

    def arrivals(self) -> list[Arrival]:
        """Return the fronts that have come in since the last call."""
        self._bell.clear()
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
            self._bell.ring()

        thread = threading.Thread(target=wait, name="kvell-leash", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Let nobody in any more."""
        self._doorway.close()
        for arrival in self.arrivals():
            arrival.sock.close()
        self._bell.close()

    def _enters(self, heard: Greeting, sock: socket.socket) -> None:
        if not heard.instance or NAME_END in heard.instance:
            raise ProtocolError("a front's name must be a word")
        self._arrived.append(Arrival(heard.instance, sock, heard.incarnation))
        self._bell.ring()
