"""What two instances on one host tell each other first, with the descriptors of their memory."""

import array
import hmac
import socket

import msgspec

from kvell.frames import FrameReader, ProtocolError, framed

VERSION = 1
GREETING_BYTES = 4096
"""Most bytes of a greeting."""
DESCRIPTORS = 2


class Greeting(msgspec.Struct, frozen=True):
    """Who this is.

    :param proof: of the cluster's secret, over the rest.
    :param pool_bytes: of the memory that its first descriptor is; the second is its table of
        rights.
    """

    version: int
    instance: str
    incarnation: int
    fingerprint: str
    pool_bytes: int
    proof: str


def greeting(
    secret: bytes, instance: str, incarnation: int, fingerprint: str, pool_bytes: int
) -> Greeting:
    """A greeting with its proof."""
    said = f"{VERSION} {instance} {incarnation} {fingerprint} {pool_bytes}".encode()
    proof = hmac.new(secret, said, "sha256").hexdigest()
    return Greeting(VERSION, instance, incarnation, fingerprint, pool_bytes, proof)


def say(sock: socket.socket, told: Greeting, descriptors: tuple[int, int]) -> None:
    """Send a greeting and the descriptors with it."""
    fds = array.array("i", descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
    sock.sendmsg([framed(msgspec.msgpack.encode(told))], ancillary)


def hear(sock: socket.socket, secret: bytes) -> tuple[Greeting, list[int]]:
    """Receive the peer's greeting and its descriptors, which are the caller's to close.

    :raises ProtocolError: when it is none, or does not know the secret; then no descriptor is
        left open.
    :raises OSError: when the connection fails, or nothing comes within the socket's timeout.
    """
    reader, fds = FrameReader(), array.array("i")
    bodies: list[bytes] = []
    try:
        while not bodies:
            space = socket.CMSG_SPACE(DESCRIPTORS * fds.itemsize)
            data, ancillary, _, _ = sock.recvmsg(GREETING_BYTES, space)
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
            if not data:
                raise ProtocolError("the peer hung up before it said who it is")
            bodies = reader.feed(data)
            if reader.pending_bytes > GREETING_BYTES:
                raise ProtocolError("a greeting is too long")
        told = _checked(bodies, secret)
        if len(fds) != DESCRIPTORS or reader.pending_bytes:
            raise ProtocolError("a greeting came without its descriptors, or with more behind it")
    except BaseException:
        for descriptor in fds:
            socket.close(descriptor)
        raise
    return told, fds.tolist()


def _checked(bodies: list[bytes], secret: bytes) -> Greeting:
    if len(bodies) != 1:
        raise ProtocolError("more than a greeting came")
    try:
        told = msgspec.msgpack.decode(bodies[0], type=Greeting)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"malformed greeting: {error}") from error
    if told.version != VERSION:
        raise ProtocolError(f"the peer speaks version {told.version}, not {VERSION}")
    right = greeting(secret, told.instance, told.incarnation, told.fingerprint, told.pool_bytes)
    if not hmac.compare_digest(right.proof, told.proof):
        raise ProtocolError("the peer does not know the cluster's secret")
    return told
