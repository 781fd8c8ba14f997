"""What two instances tell each other first; on one host, with descriptors of their memory."""

import array
import hmac
import socket

import msgspec

from kvell.frames import FrameReader, ProtocolError, framed

VERSION = 2
GREETING_BYTES = 4096
"""Most bytes of a greeting."""
GREETING_SECONDS = 5.0
"""A peer must say who it is within this time."""
DESCRIPTORS = 2


class Greeting(msgspec.Struct, frozen=True):
    """Who this is.

    :param pool_bytes: of its memory.  On one host that is the first descriptor that comes along;
        the second is its table of rights.
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


def proven(told: Greeting, secret: bytes, session: bytes = b"") -> Greeting:
    """A greeting with its proof.

    :param session: makes the proof worthless elsewhere; nothing where only processes of this user
        can hear it.
    """
    return msgspec.structs.replace(told, proof=_proof(told, secret, session))


def checked(body: bytes, secret: bytes, session: bytes = b"") -> Greeting:
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
        if len(bodies) != 1:
            raise ProtocolError("more than a greeting came")
        told = checked(bodies[0], secret)
        if len(fds) != DESCRIPTORS or reader.pending_bytes:
            raise ProtocolError("a greeting came without its descriptors, or with more behind it")
    except BaseException:
        for descriptor in fds:
            socket.close(descriptor)
        raise
    return told, fds.tolist()


def _proof(told: Greeting, secret: bytes, session: bytes) -> str:
    said = msgspec.msgpack.encode((session, msgspec.structs.replace(told, proof="")))
    return hmac.new(secret, said, "sha256").hexdigest()
