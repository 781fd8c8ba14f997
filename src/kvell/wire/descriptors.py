"""Descriptors of own memory, given to a peer of this host for the descriptors of its own."""

import array
import os
import socket
from collections.abc import Iterable

from kvell.wire.frames import ProtocolError

DESCRIPTORS = 2
MEMORY_FOLLOWS = b"m"
"""The byte that descriptors come with."""


def exchange_descriptors(
    sock: socket.socket, descriptors: tuple[int, int], seconds: float
) -> list[int]:
    """Give a proven peer of this host the descriptors of own memory, and get those of its own.

    What is given can be mapped for reading alone.

    :returns: the peer's, which are the caller's to close.
    :raises ProtocolError: when something else comes; then no descriptor is left open.
    :raises OSError: when the connection fails, or nothing comes in time.
    """
    given, fds = list[int](), array.array("i")
    try:
        for one in descriptors:
            given.append(_for_reading(one))
        sock.settimeout(seconds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))]
        sock.sendmsg([MEMORY_FOLLOWS], ancillary)
        space = socket.CMSG_SPACE(DESCRIPTORS * fds.itemsize)
        data, found, _, _ = sock.recvmsg(len(MEMORY_FOLLOWS), space)
        for level, kind, content in found:
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


def _for_reading(descriptor: int) -> int:
    """A further descriptor of a memfd, which cannot write."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
