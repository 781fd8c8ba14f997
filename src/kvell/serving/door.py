"""The listener of an instance for fronts on several machines.

::

    keeper ── stdin: the secret ──► instance ── stdout: its address ──► keeper
                                        ▲
    fronts, manager ── connect ─────────┘  both sides prove that they have the secret
      keeper ── stdin ends ──► the instance closes all connections, and exits

The keeper holds the other end of stdin open, so an instance exits when its keeper dies.
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

    :raises ProtocolError: if the pipe ends earlier.
    """
    secret = b""
    while len(secret) < SECRET_BYTES:
        piece = os.read(descriptor, SECRET_BYTES - len(secret))
        if not piece:
            raise ProtocolError(f"the secret has {len(secret)} of {SECRET_BYTES} bytes")
        secret += piece
    return secret


class FrontListener:
    """A listener for fronts; authenticated connections queue until the loop accepts them.

    :param host: address of this machine for the fronts.
    :param instance: name that is sent to fronts, with ``incarnation``.
    :raises ChangeSomething: if the address cannot be bound, or the secret is too short.
    :ivar address: like ``tcp://10.0.0.1:5000``.
    """

    def __init__(self, host: str, secret: bytes, instance: str, incarnation: int) -> None:
        check_secret(secret)
        self._arrived: deque[Arrival] = deque()
        self._bell = Bell()
        self.is_over = False
        listener = listen_at(tcp_endpoint(host, 0))
        greeting = Greeting(instance, incarnation, "", 0)
        self._doorway = Doorway(listener, greeting, secret, {"commands": self._enters})
        self.address = str(self._doorway.address)
        self._doorway.open()

    def __enter__(self) -> "FrontListener":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def descriptor(self) -> int:
        return self._bell.descriptor

    def on_left(self, front: ConnectedFront) -> None:
        """Do nothing: other fronts may connect (:class:`.Arrivals`)."""

    def arrivals(self) -> list[Arrival]:
        self._bell.clear()
        arrivals = []
        while self._arrived:
            arrivals.append(self._arrived.popleft())
        return arrivals

    def ends_with(self, descriptor: int) -> threading.Thread:
        """Set :attr:`is_over` when a pipe ends because the process at its other end closes it."""

        def wait() -> None:
            with contextlib.suppress(OSError):
                while os.read(descriptor, LEASH_BYTES):
                    pass  # the keeper sends nothing more
            self.is_over = True
            self._bell.ring()

        thread = threading.Thread(target=wait, name="kvell-leash", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self._doorway.close()
        for arrival in self.arrivals():
            arrival.sock.close()
        self._bell.close()

    def _enters(self, greeting: Greeting, sock: socket.socket) -> None:
        if not greeting.instance or NAME_END in greeting.instance:
            raise ProtocolError("a front's name must be a word")
        self._arrived.append(Arrival(greeting.instance, sock, greeting.incarnation))
        self._bell.ring()
