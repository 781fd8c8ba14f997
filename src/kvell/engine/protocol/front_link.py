"""How an instance comes to its front over TCP: whoever started it gives it the way and the secret.

::

    keeper ── stdin: the secret ──► instance ── proves it, hears the front's proof ──► front
      └────── stdin ends ─────────► instance ── hangs up, and ends as when the front closes

The keeper keeps the other end of stdin open.  So an instance does not outlive it, however it ends.
"""

import contextlib
import os
import socket
import threading

from kvell.errors import TryLater
from kvell.frames import ProtocolError
from kvell.mempool.place import SECRET_BYTES
from kvell.mempool.transports.endpoints import connect_to
from kvell.mempool.transports.greeting import GREETING_SECONDS, Greeting
from kvell.mempool.transports.tcp.challenge import open_session
from kvell.mempool.transports.tcp.channel import Channel

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


def reach_front(address: str, secret: bytes, instance: str, incarnation: int) -> socket.socket:
    """A connection to the front, after both sides have proved that they know the secret.

    :param address: like ``tcp://10.0.0.1:5000``.
    :raises TryLater: when nobody answers there in time.
    :raises ProtocolError: when whoever answers is no front of this cluster.
    """
    try:
        sock = connect_to(address, GREETING_SECONDS)
    except OSError as error:
        raise TryLater(f"no front answers at {address} ({error})") from error
    try:
        open_session(Channel(sock), Greeting(instance, incarnation, "", 0), secret, "commands")
    except OSError as error:
        sock.close()
        raise TryLater(f"the front at {address} does not answer ({error})") from error
    except ProtocolError:
        sock.close()
        raise
    return sock


def hang_up_at_end(descriptor: int, sock: socket.socket) -> threading.Thread:
    """Hang up when a pipe ends, which the process at its other end holds; in a thread."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(descriptor, LEASH_BYTES):
                pass  # nothing more is said there
        with contextlib.suppress(OSError):  # it has ended
            sock.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=wait, name="kvell-leash", daemon=True)
    thread.start()
    return thread
