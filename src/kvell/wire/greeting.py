"""The identity of a process, with its proof that the process has the cluster's secret."""

import hmac
import secrets
import time

import msgspec

from kvell.wire.decoding import decode
from kvell.wire.frames import ProtocolError

VERSION = 4
GREETING_BYTES = 4096
"""The largest size of a greeting."""
GREETING_SECONDS = 5.0
"""The time that a peer has to authenticate."""


class Greeting(msgspec.Struct, frozen=True):
    """The identity of a process.

    :param pool_bytes: the size of its page pool and of the CPU buffer after it.  On one host two
        descriptors follow the greeting: that memory and the table of rights.
    :param port: its TCP port; 0 if it does not listen for TCP.
    :param proof: an HMAC with the cluster's secret over the other fields and the session.
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
    """Return a number for this start of an instance. Later starts get higher numbers.

    It is the Unix time in milliseconds followed by ten random bits; JSON represents it exactly.
    """
    return time.time_ns() // 1_000_000 << 10 | secrets.randbits(10)


def proven(greeting: Greeting, secret: bytes, session: bytes) -> Greeting:
    """Return a greeting with its proof.

    :param session: the session to which the proof is bound.
    """
    return msgspec.structs.replace(greeting, proof=_proof(greeting, secret, session))


def check(body: bytes, secret: bytes, session: bytes) -> Greeting:
    """Read and verify a greeting.

    :raises ProtocolError: when the greeting is malformed or its proof is wrong.
    """
    greeting = decode(_GREETING, body, "greeting")
    if greeting.version != VERSION:
        raise ProtocolError(f"the peer speaks version {greeting.version}, not {VERSION}")
    right = _proof(greeting, secret, session)
    if not hmac.compare_digest(right.encode(), greeting.proof.encode()):
        raise ProtocolError("the peer has another secret")
    return greeting


def _proof(greeting: Greeting, secret: bytes, session: bytes) -> str:
    data = msgspec.msgpack.encode((session, msgspec.structs.replace(greeting, proof="")))
    return hmac.new(secret, data, "sha256").hexdigest()
