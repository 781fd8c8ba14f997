"""Two instances prove to each other that they know the cluster's secret, over TCP.

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
from typing import Literal

import msgspec

from kvell.errors import ChangeSomething
from kvell.frames import ProtocolError
from kvell.mempool.transports.greeting import (
    GREETING_BYTES,
    GREETING_SECONDS,
    VERSION,
    Greeting,
    checked,
    proven,
)
from kvell.mempool.transports.tcp.channel import Channel, within

NONCE_BYTES = 32
LEAST_SECRET_BYTES = 16
"""Whoever hears a proof may try secrets at leisure."""

Purpose = Literal["messages", "pages", "commands", "cluster"]
"""What a connection is for: messages between instances, pages, a front's commands, or the words
between a front and its cluster's manager."""
AMONG_INSTANCES: tuple[Purpose, ...] = ("messages", "pages")


class Hello(msgspec.Struct, frozen=True):
    """The first words of both sides."""

    version: int
    purpose: Purpose
    nonce: bytes


_HELLO = msgspec.msgpack.Decoder(Hello)


def open_session(channel: Channel, told: Greeting, secret: bytes, purpose: Purpose) -> Greeting:
    """Introduce this instance to one that answers; returns who that is.

    :raises ProtocolError: when it is no instance of this cluster, or this one itself.
    :raises OSError: when the connection fails or takes longer than ``GREETING_SECONDS``.
    """
    look, nonce = within(GREETING_SECONDS), secrets.token_bytes(NONCE_BYTES)
    channel.say(Hello(VERSION, purpose, nonce), look)
    hello = _checked(channel.hear(_HELLO, GREETING_BYTES, look))
    if hello.purpose != purpose:
        raise ProtocolError("the peer answers for another purpose")
    nonces = nonce + hello.nonce
    channel.say(proven(told, secret, _session("opens", purpose, nonces)), look)
    body = channel.hear_body(GREETING_BYTES, look)
    return _other(checked(body, secret, _session("answers", purpose, nonces)), told)


def answer_session(
    channel: Channel,
    told: Greeting,
    secret: bytes,
    purposes: tuple[Purpose, ...] = AMONG_INSTANCES,
) -> tuple[Purpose, Greeting]:
    """Answer an instance that connects; returns what it wants and who it is.

    :param purposes: that are served here.
    :raises ProtocolError: when it is no instance of this cluster, this one itself, or wants
        something else.
    :raises OSError: when the connection fails or takes longer than ``GREETING_SECONDS``.
    """
    look, nonce = within(GREETING_SECONDS), secrets.token_bytes(NONCE_BYTES)
    hello = _checked(channel.hear(_HELLO, GREETING_BYTES, look))
    if hello.purpose not in purposes:
        raise ProtocolError("the peer asks for another purpose")
    channel.say(Hello(VERSION, hello.purpose, nonce), look)
    nonces = hello.nonce + nonce
    body = channel.hear_body(GREETING_BYTES, look)
    heard = _other(checked(body, secret, _session("opens", hello.purpose, nonces)), told)
    channel.say(proven(told, secret, _session("answers", hello.purpose, nonces)), look)
    return hello.purpose, heard


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


def _checked(hello: Hello) -> Hello:
    if hello.version != VERSION:
        raise ProtocolError(f"the peer speaks version {hello.version}, not {VERSION}")
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
