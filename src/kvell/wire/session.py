"""The handshake by which two processes prove that they have the cluster's secret.

::

    opens                                     answers
      │ ── Hello(purpose, nonce) ────────────► │
      │ ◄── Hello(purpose, nonce) ──────────── │
      │ ── Greeting, proven for both nonces ─► │  hangs up unless it is right
      │ ◄── Greeting, proven for both nonces ─ │

Nonces are fresh, so a recorded handshake cannot be replayed. The proof of one side is useless for
the other. The answering side sends its proof only to an authenticated peer. Later traffic is
neither encrypted nor signed.
"""

import secrets
from collections.abc import Collection
from typing import Literal

import msgspec

from kvell.errors import ChangeSomething
from kvell.release import RELEASE
from kvell.wire.blocking import BlockingSocket, within
from kvell.wire.decoding import decode
from kvell.wire.frames import FrameReader, ProtocolError, frame
from kvell.wire.greeting import (
    GREETING_BYTES,
    GREETING_SECONDS,
    VERSION,
    Greeting,
    check,
    proven,
)

NONCE_BYTES = 32
LEAST_SECRET_BYTES = 16
"""The least length of a secret. An eavesdropper on a proof can try secrets offline."""

Purpose = Literal["messages", "pages", "partials", "commands", "cluster"]
"""The purpose of a connection: messages between instances, pages, attention over lent pages, a
front's commands, or messages between a front and its cluster's manager."""


class Hello(msgspec.Struct, frozen=True):
    """The first message of either side.

    :param release: the release of Kvell. Different releases refuse each other.
    """

    version: int
    purpose: Purpose
    nonce: bytes
    release: str = RELEASE


class OtherReleaseError(ProtocolError):
    """The other side runs another release.

    :param answer: the bytes to send before the connection ends.
    """

    def __init__(self, problem: str, answer: bytes) -> None:
        self.answer = answer
        super().__init__(problem)


_HELLO = msgspec.msgpack.Decoder(Hello)


def open_session(
    channel: BlockingSocket, greeting: Greeting, secret: bytes, purpose: Purpose
) -> Greeting:
    """Authenticate as the opening side and return the peer's greeting.

    :raises ProtocolError: when the peer is of another cluster, or is this instance.
    :raises ChangeSomething: when the peer runs another release.
    :raises OSError: when the connection fails or takes longer than ``GREETING_SECONDS``.
    """
    opening = Opening(greeting, secret, purpose)
    look = within(GREETING_SECONDS)
    outgoing = opening.hello
    while True:
        if outgoing:
            channel.send([outgoing], look)
        if opening.met is not None:
            return opening.met
        data = bytearray(opening.wanted_bytes)
        channel.receive([data], look)
        outgoing = opening.hear(bytes(data))


class Opening:
    """The opening side of a session. It does no I/O.

    :ivar met: the peer's greeting, once the peer is authenticated.
    """

    def __init__(self, greeting: Greeting, secret: bytes, purpose: Purpose) -> None:
        self._told, self._secret, self._purpose = greeting, secret, purpose
        self._frames = FrameReader(GREETING_BYTES)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces: bytes | None = None
        self.hello = frame(msgspec.msgpack.encode(Hello(VERSION, purpose, self._nonce)))
        self.met: Greeting | None = None

    @property
    def wanted_bytes(self) -> int:
        return self._frames.missing_bytes

    def hear(self, data: bytes) -> bytes:
        """Process received bytes and return the bytes to send.

        :raises ProtocolError: when the peer is of another cluster, or is this instance.
        :raises ChangeSomething: when the peer runs another release.
        """
        return b"".join(self._heard(body) for body in self._frames.feed(data))

    def _heard(self, body: bytes) -> bytes:
        if self._nonces is not None:
            session = _session("answers", self._purpose, self._nonces)
            self.met = _other(check(body, self._secret, session), self._told)
            return b""
        hello = _hello(body)
        if (hello.version, hello.release) != (VERSION, RELEASE):
            problem = f"is the other side's release, and {RELEASE} is this one's"
            remedy = "install the same release of kvell on every machine"
            raise ChangeSomething("release", hello.release, problem, remedy)
        if hello.purpose != self._purpose:
            raise ProtocolError("the peer answers for another purpose")
        self._nonces = self._nonce + hello.nonce
        session = _session("opens", self._purpose, self._nonces)
        return frame(msgspec.msgpack.encode(proven(self._told, self._secret, session)))


class ServerHandshake:
    """The answering side of a session. It does no I/O.

    :ivar met: the peer's purpose and greeting, once the peer is authenticated.
    """

    def __init__(self, greeting: Greeting, secret: bytes, purposes: Collection[Purpose]) -> None:
        self._told, self._secret, self._purposes = greeting, secret, purposes
        self._frames = FrameReader(GREETING_BYTES)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._hello: Hello | None = None
        self.met: tuple[Purpose, Greeting] | None = None

    def hear(self, data: bytes) -> bytes:
        """Process received bytes and return the bytes to send.

        :raises OtherReleaseError: when the peer runs another release.
        :raises ProtocolError: when the peer is of another cluster, is this instance, or
            asks for a purpose that is not accepted.
        """
        outgoing = b""
        for body in self._frames.feed(data):
            if self.met is not None:
                raise ProtocolError("received more than a greeting")
            outgoing += self._greeted(body) if self._hello is not None else self._answered(body)
        if self.met is not None and self._frames.pending_bytes:
            raise ProtocolError("received more than a greeting")
        return outgoing

    def _answered(self, body: bytes) -> bytes:
        hello = _hello(body)
        answer = frame(msgspec.msgpack.encode(Hello(VERSION, hello.purpose, self._nonce)))
        if hello.version != VERSION:
            problem = f"the peer speaks version {hello.version}, not {VERSION}"
            raise OtherReleaseError(problem, answer)
        if hello.release != RELEASE:
            raise OtherReleaseError(f"the peer's release is {hello.release}, not {RELEASE}", answer)
        if hello.purpose not in self._purposes:
            raise ProtocolError("the peer asks for another purpose")
        self._hello = hello
        return answer

    def _greeted(self, body: bytes) -> bytes:
        assert self._hello is not None, "the first words come before"
        purpose = self._hello.purpose
        nonces = self._hello.nonce + self._nonce
        peer = _other(check(body, self._secret, _session("opens", purpose, nonces)), self._told)
        self.met = purpose, peer
        answer = proven(self._told, self._secret, _session("answers", purpose, nonces))
        return frame(msgspec.msgpack.encode(answer))


def check_secret(secret: bytes) -> None:
    """Refuse secrets that could be guessed.

    :raises ChangeSomething: when the secret is too short.
    """
    if len(secret) < LEAST_SECRET_BYTES:
        raise ChangeSomething(
            "secret",
            f"{len(secret)} bytes",
            f"must have {LEAST_SECRET_BYTES} bytes or more where instances meet over TCP",
            "give all of them the same secrets.token_bytes(32)",
        )


def _hello(body: bytes) -> Hello:
    hello = decode(_HELLO, body, "greeting")
    if len(hello.nonce) != NONCE_BYTES:
        raise ProtocolError("the peer's nonce has another length")
    return hello


def _other(peer: Greeting, local: Greeting) -> Greeting:
    if (peer.instance, peer.incarnation) == (local.instance, local.incarnation):
        raise ProtocolError("it is this instance itself")
    return peer


def _session(side: Literal["opens", "answers"], purpose: Purpose, nonces: bytes) -> bytes:
    return f"{side} {purpose} ".encode() + nonces
