"""What two instances tell each other first; on one host, with descriptors of their memory."""

import array
import hmac
import os
import socket
from collections.abc import Iterable

import msgspec

from kvell.frames import ProtocolError

VERSION = 3
GREETING_BYTES = 4096
"""Most bytes of a greeting."""
GREETING_SECONDS = 5.0
"""A peer must say who it is within this time."""
DESCRIPTORS = 2
MEMORY_FOLLOWS = b"m"
"""The byte that descriptors come with."""


class Greeting(msgspec.Struct, frozen=True):
    """Who this is.

    :param pool_bytes: of its memory.  On one host that is the first descriptor that follows; the
        second is its table of rights.
    :param port: at which it listens for TCP; 0: nowhere.
    :param proof: of the cluster's secret, over the rest and the session that it is said in.
    """

    instance: str
    incarnation: int
    fingerprint: str
    pool_bytes: int
    port: int = 0
    version: int = VERSION
    proof: str = ""


def proven(told: Greeting, secret: bytes, session: bytes) -> Greeting:
    """A greeting with its proof.

    :param session: makes the proof worthless elsewhere.
    """
    return msgspec.structs.replace(told, proof=_proof(told, secret, session))


def checked(body: bytes, secret: bytes, session: bytes) -> Greeting:
    """Read a greeting.

    :raises ProtocolError: when it is none, or does not know the secret.
    """
    try:
        told = msgspec.msgpack.decode(body, type=Greeting)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"malformed greeting: {error}") from error
    if told.version != VERSION:
        raise ProtocolError(f"the peer speaks version {told.version}, not {VERSION}")
    right = _proof(told, secret, session)
    if not hmac.compare_digest(right.encode(), told.proof.encode()):
        raise ProtocolError("the peer does not know the cluster's secret")
    return told


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


def _proof(told: Greeting, secret: bytes, session: bytes) -> str:
    said = msgspec.msgpack.encode((session, msgspec.structs.replace(told, proof="")))
    return hmac.new(secret, said, "sha256").hexdigest()
