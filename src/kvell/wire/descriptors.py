"""Exchange of memory descriptors with a peer on the same host."""

import array
import os
import socket
from collections.abc import Iterable

from kvell.wire.frames import ProtocolError

DESCRIPTORS = 2
MEMORY_FOLLOWS = b"m"
"""The byte that carries the descriptors."""


def exchange_descriptors(
    sock: socket.socket, descriptors: tuple[int, int], seconds: float
) -> list[int]:
    """Send memory descriptors to an authenticated peer on this host and receive its own.

    The peer can map the sent descriptors only for reading.

    :returns: the peer's descriptors. The caller must close them.
    :raises ProtocolError: when the peer sends anything else; then no descriptor is left open.
    :raises OSError: when the connection fails or times out.
    """
    given = list[int]()
    fds = array.array("i")
    try:
        for descriptor in descriptors:
            path = f"/proc/self/fd/{descriptor}"
            given.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        sock.settimeout(seconds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))]
        sock.sendmsg([MEMORY_FOLLOWS], ancillary)
        space = socket.CMSG_SPACE(DESCRIPTORS * fds.itemsize)
        data, received, _, _ = sock.recvmsg(len(MEMORY_FOLLOWS), space)
        for level, kind, content in received:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if data != MEMORY_FOLLOWS or len(fds) != DESCRIPTORS:
            raise ProtocolError("the peer did not give the descriptors of its memory")
    except BaseException:
        _close(fds)
        raise
    finally:
        _close(given)
    return fds.tolist()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
