"""Who somebody at a connection is, and the proof that it knows the cluster's secret."""

import hmac
import secrets
import time

import msgspec

from kvell.wire.decoding import decode
from kvell.wire.frames import ProtocolError

VERSION = 4
GREETING_BYTES = 4096
"""Most bytes of a greeting."""
GREETING_SECONDS = 5.0
"""A peer must say who it is within this time."""


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


_GREETING = msgspec.msgpack.Decoder(Greeting)


def new_incarnation() -> int:
    """The number of a start: later ones have higher numbers, and no two have the same.

    It is a number that JSON keeps: milliseconds of Unix time, and ten bits of chance.
    """
    return time.time_ns() // 1_000_000 << 10 | secrets.randbits(10)


def proven(told: Greeting, secret: bytes, session: bytes) -> Greeting:
    """A greeting with its proof.

    :param session: makes the proof worthless elsewhere.
    """
    return msgspec.structs.replace(told, proof=_proof(told, secret, session))


def checked(body: bytes, secret: bytes, session: bytes) -> Greeting:
    """Read a greeting.

    :raises ProtocolError: when it is none, or does not know the secret.
    """
    told = decode(_GREETING, body, "greeting")
    if told.version != VERSION:
        raise ProtocolError(f"the peer speaks version {told.version}, not {VERSION}")
    right = _proof(told, secret, session)
    if not hmac.compare_digest(right.encode(), told.proof.encode()):
        raise ProtocolError("the peer does not know the cluster's secret")
    return told


def _proof(told: Greeting, secret: bytes, session: bytes) -> str:
    said = msgspec.msgpack.encode((session, msgspec.structs.replace(told, proof="")))
    return hmac.new(secret, said, "sha256").hexdigest()
