"""Two processes prove to each other that they know the cluster's secret.

::

    opens                                     answers
      │ ── Hello(purpose, nonce) ────────────► │
      │ ◄── Hello(purpose, nonce) ──────────── │
      │ ── Greeting, proven for both nonces ─► │  hangs up unless it is right
      │ ◄── Greeting, proven likewise ──────── │

Nonces are fresh, so what was said once is worth nothing later; proofs of the two sides differ, so
nobody can be made to prove what somebody else is asked.  Whoever answers proves nothing to
strangers.  What is said after that is neither encrypted nor signed.
"""

import secrets
from collections.abc import Collection
from typing import Literal

import msgspec

from kvell.errors import ChangeSomething
from kvell.release import RELEASE
from kvell.wire.blocking import BlockingSocket, within
from kvell.wire.decoding import decode
from kvell.wire.frames import FrameReader, ProtocolError, framed
from kvell.wire.greeting import (
    GREETING_BYTES,
    GREETING_SECONDS,
    VERSION,
    Greeting,
    checked,
    proven,
)

NONCE_BYTES = 32
LEAST_SECRET_BYTES = 16
"""Whoever hears a proof may try secrets at leisure."""

Purpose = Literal["messages", "pages", "partials", "commands", "cluster"]
"""What a connection is for: messages between instances, pages, attention over lent pages, a front's
commands, or the words between a front and its cluster's manager."""


class Hello(msgspec.Struct, frozen=True):
    """The first words of both sides.

    :param release: of Kvell; two releases do not talk to each other.
    """

    version: int
    purpose: Purpose
    nonce: bytes
    release: str = RELEASE


class OtherReleaseError(ProtocolError):
    """The other side runs another release.

    :param answer: what it is told before the connection ends.
    """

    def __init__(self, problem: str, answer: bytes) -> None:
        self.answer = answer
        super().__init__(problem)


_HELLO = msgspec.msgpack.Decoder(Hello)


def open_session(
    channel: BlockingSocket, told: Greeting, secret: bytes, purpose: Purpose
) -> Greeting:
    """Introduce this instance to one that answers; returns who that is.

    :raises ProtocolError: when it is no instance of this cluster, or this one itself.
    :raises ChangeSomething: when it runs another release.
    :raises OSError: when the connection fails or takes longer than ``GREETING_SECONDS``.
    """
    opening, look = Opening(told, secret, purpose), within(GREETING_SECONDS)
    said = opening.hello
    while True:
        if said:
            channel.send([said], look)
        if opening.met is not None:
            return opening.met
        heard = bytearray(opening.wanted_bytes)
        channel.receive([heard], look)
        said = opening.hear(bytes(heard))


class Opening:
    """The opening side of a session; it asks for as many bytes as it reads, and no more.

    :param told: who this is.
    :ivar hello: is sent at once.
    :ivar met: who answers, once that is proved.
    """

    def __init__(self, told: Greeting, secret: bytes, purpose: Purpose) -> None:
        self._told, self._secret, self._purpose = told, secret, purpose
        self._frames = FrameReader(GREETING_BYTES)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces: bytes | None = None
        self.hello = framed(msgspec.msgpack.encode(Hello(VERSION, purpose, self._nonce)))
        self.met: Greeting | None = None

    @property
    def wanted_bytes(self) -> int:
        """Bytes to read next; what follows the greeting is not for this side of a session."""
        return self._frames.missing_bytes

    def hear(self, data: bytes) -> bytes:
        """Take in what came; returns what is to be sent.

        :raises ProtocolError: when the other side is no instance of this cluster, or this one
            itself.
        :raises ChangeSomething: when it runs another release.
        """
        return b"".join(self._heard(body) for body in self._frames.feed(data))

    def _heard(self, body: bytes) -> bytes:
        if self._nonces is not None:
            session = _session("answers", self._purpose, self._nonces)
            self.met = _other(checked(body, self._secret, session), self._told)
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
        return framed(msgspec.msgpack.encode(proven(self._told, self._secret, session)))


class Answering:
    """The answering side of a session: what comes is fed in, and what it returns is sent.

    :param told: who this is.
    :param purposes: that are served here.
    :ivar met: what the other side wants and who it is, once that is proved and everything
        returned is sent.
    """

    def __init__(self, told: Greeting, secret: bytes, purposes: Collection[Purpose]) -> None:
        self._told, self._secret, self._purposes = told, secret, purposes
        self._frames = FrameReader(GREETING_BYTES)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._hello: Hello | None = None
        self.met: tuple[Purpose, Greeting] | None = None

    def hear(self, data: bytes) -> bytes:
        """Take in what came; returns what is to be sent.

        :raises ProtocolError: when the other side is no instance of this cluster, this one itself,
            or wants something else; :class:`OtherReleaseError` when it runs another release.
        """
        said = b""
        for body in self._frames.feed(data):
            if self.met is not None:
                raise ProtocolError("more came than a greeting")
            said += self._greeted(body) if self._hello is not None else self._answered(body)
        if self.met is not None and self._frames.pending_bytes:
            raise ProtocolError("more came than a greeting")
        return said

    def _answered(self, body: bytes) -> bytes:
        """The answer to the first words."""
        hello = _hello(body)
        answer = framed(msgspec.msgpack.encode(Hello(VERSION, hello.purpose, self._nonce)))
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
        """The answer to who it is."""
        assert self._hello is not None, "the first words come before"
        purpose, nonces = self._hello.purpose, self._hello.nonce + self._nonce
        heard = _other(checked(body, self._secret, _session("opens", purpose, nonces)), self._told)
        self.met = purpose, heard
        answer = proven(self._told, self._secret, _session("answers", purpose, nonces))
        return framed(msgspec.msgpack.encode(answer))


def check_secret(secret: bytes) -> None:
    """Refuse secrets that could be guessed.

    :raises ChangeSomething: if it is too short.
    """
    if len(secret) < LEAST_SECRET_BYTES:
        raise ChangeSomething(
            "secret",
            f"{len(secret)} bytes",
            f"must have {LEAST_SECRET_BYTES} bytes or more where instances meet over TCP",
            "give all of them the same secrets.token_bytes(32)",
        )


def _hello(body: bytes) -> Hello:
    """Read the first words of the other side.

    :raises ProtocolError: when they are none.
    """
    hello = decode(_HELLO, body, "greeting")
    if len(hello.nonce) != NONCE_BYTES:
        raise ProtocolError("the peer's nonce has another length")
    return hello


def _other(heard: Greeting, told: Greeting) -> Greeting:
    """Who was heard, unless it is an echo."""
    if (heard.instance, heard.incarnation) == (told.instance, told.incarnation):
        raise ProtocolError("it is this instance itself")
    return heard


def _session(side: Literal["opens", "answers"], purpose: Purpose, nonces: bytes) -> bytes:
    return f"{side} {purpose} ".encode() + nonces
