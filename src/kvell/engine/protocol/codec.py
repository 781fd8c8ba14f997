"""The instance protocol as bytes: msgpack in frames with checksums, never pickle.

A frame is a header and a body; a body is the msgpack array
``[name of the message type, {field: value}]``.  A header is three little-endian u32::

    0             4                       8                    12
    │ body length │ crc32 of those 4 bytes │ crc32 of the body │

The length has a checksum of its own: a damaged one is noticed with the header, and can never
make the reader wait for bytes that do not come.
"""

import contextlib
import dataclasses
import struct
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import msgspec

from kvell.engine.protocol import messages as protocol
from kvell.engine.protocol.logprobs import PromptLogprobs
from kvell.engine.protocol.messages import Command, Event
from kvell.engine.protocol.pages import AskLargePage, AskPages, LargePage, Pages
from kvell.errors import ChangeSomething, KvellError

HEADER_BYTES = 12
MAX_FRAME_BYTES = 64 << 20
"""Largest body that either side accepts: room for a prompt of 16 million tokens."""

Message = Command | Event

_LENGTH_BYTES = 4
_CHECKSUMS = struct.Struct("<II")
_HEADER = struct.Struct("<III")
assert _HEADER.size == HEADER_BYTES


class ProtocolError(KvellError):
    """The peer sent bytes that are not the instance protocol; the connection is unusable."""


def _by_name(types: Iterable[Any]) -> dict[str, tuple[Any, frozenset[str]]]:
    return {t.__name__: (t, frozenset(_names(t))) for t in types}


def _names(kind: Any) -> Iterable[str]:
    if issubclass(kind, msgspec.Struct):
        names: tuple[str, ...] = kind.__struct_fields__
        return names
    return (field.name for field in dataclasses.fields(kind))


_COMMANDS = _by_name(
    (
        protocol.Submit,
        protocol.Cancel,
        protocol.AskStats,
        AskPages,
        AskLargePage,
        protocol.Drain,
    )
)
_EVENTS = _by_name(
    (
        protocol.Ready,
        PromptLogprobs,
        protocol.Tokens,
        protocol.Finished,
        protocol.Stats,
        Pages,
        LargePage,
        protocol.Heartbeat,
        protocol.Drained,
    )
)
_ENCODER = msgspec.msgpack.Encoder()
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_DECODERS = {
    name: msgspec.msgpack.Decoder(kind) for name, (kind, _) in (_COMMANDS | _EVENTS).items()
}


_TOKENS = msgspec.msgpack.Decoder(tuple[str, protocol.Tokens])
_TOKENS_HEAD = _ENCODER.encode((protocol.Tokens.__name__,))[1:]


def encode_frame(message: Message) -> bytes:
    """Encode one message as a whole frame.

    :raises ProtocolError: when the body would exceed ``MAX_FRAME_BYTES``.
    """
    return framed(_ENCODER.encode((type(message).__name__, message)))


def framed(body: bytes) -> bytes:
    """Put a header in front of a body.

    :raises ProtocolError: when the body exceeds ``MAX_FRAME_BYTES``.
    """
    _check_length(len(body))
    length = len(body).to_bytes(_LENGTH_BYTES, "little")
    return length + _CHECKSUMS.pack(crc32(length), crc32(body)) + body


def decode_command(body: bytes) -> Command:
    """Decode the command in a frame's body.

    :raises ProtocolError: on anything that is not exactly one well-typed command.
    """
    command: Command = _decode(body, _COMMANDS, "command")
    return command


def decode_event(body: bytes) -> Event:
    """Decode the event in a frame's body.

    :raises ProtocolError: on anything that is not exactly one well-typed event.
    """
    if body.startswith(_TOKENS_HEAD, 1):  # the common case: one call, unless it is malformed
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            return _TOKENS.decode(body)[1]
    event: Event = _decode(body, _EVENTS, "event")
    return event


def _decode(body: bytes, known: dict[str, tuple[Any, frozenset[str]]], what: str) -> Any:
    try:
        name, payload = _ENVELOPE.decode(body)
        if name not in known:
            raise ProtocolError(f"unknown {what} {name[:40]!r}")
        unknown = _FIELDS.decode(payload).keys() - known[name][1]
        if unknown:
            raise ProtocolError(f"{what} {name} has an unknown field {min(unknown)[:40]!r}")
        return _DECODERS[name].decode(payload)
    except (msgspec.DecodeError, ChangeSomething, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed {what}: {error}") from error


def _check_length(length_bytes: int) -> None:
    if length_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length_bytes} bytes exceeds {MAX_FRAME_BYTES}")


class FrameReader:
    """Cuts a byte stream into frame bodies; it holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Bytes received of an unfinished frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; return the bodies that are now complete, in order.

        :raises ProtocolError: as soon as a header is complete that is damaged or announces a body
            that is too long, or a body is complete that is damaged.  Every later call raises it
            again: nothing that follows in the stream can be trusted.
        """
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while (body := self._body_at(start)) is not None:
            bodies.append(body)
            start += HEADER_BYTES + len(body)
        del self._buffer[:start]
        return bodies

    def _body_at(self, start: int) -> bytes | None:
        begin = start + HEADER_BYTES
        if len(self._buffer) < begin:
            return None
        length_bytes, length_crc, body_crc = _HEADER.unpack_from(self._buffer, start)
        if crc32(self._buffer[start : start + _LENGTH_BYTES]) != length_crc:
            raise ProtocolError("the header of a frame is damaged: its checksum differs")
        _check_length(length_bytes)
        end = begin + length_bytes
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[begin:end])
        if crc32(body) != body_crc:
            raise ProtocolError("the body of a frame is damaged: its checksum differs")
        return body
