"""The instance protocol as bytes: msgpack in frames (:mod:`kvell.wire.frames`), never pickle.

The body of a frame is the msgpack array ``[name of the message type, {field: value}]``.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from kvell.engine.protocol.messages import Command, Event, Tokens
from kvell.wire.decoding import MalformedError, decode
from kvell.wire.frames import ProtocolError, frame

Message = Command | Event


def _by_name(types: Iterable[Any]) -> dict[str, tuple[Any, frozenset[str]]]:
    return {t.__name__: (t, frozenset(_names(t))) for t in types}


def _names(kind: Any) -> Iterable[str]:
    if issubclass(kind, msgspec.Struct):
        names: tuple[str, ...] = kind.__struct_fields__
        return names
    return (field.name for field in dataclasses.fields(kind))


_COMMANDS = _by_name(get_args(Command))
_EVENTS = _by_name(get_args(Event))
_ENCODER = msgspec.msgpack.Encoder()
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_DECODERS = {
    name: msgspec.msgpack.Decoder(kind) for name, (kind, _) in (_COMMANDS | _EVENTS).items()
}


_TOKENS = msgspec.msgpack.Decoder(tuple[str, Tokens])
_TOKENS_HEAD = _ENCODER.encode((Tokens.__name__,))[1:]


def encode_frame(message: Message) -> bytes:
    """Encode one message as a whole frame.

    :raises ProtocolError: when the body would exceed ``MAX_FRAME_BYTES``.
    """
    return frame(_ENCODER.encode((type(message).__name__, message)))


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
        try:
            return decode(_TOKENS, body)[1]
        except MalformedError:
            pass  # the slow path raises an error that names the problem
    event: Event = _decode(body, _EVENTS, "event")
    return event


def _decode(body: bytes, types: dict[str, tuple[Any, frozenset[str]]], what: str) -> Any:
    name, payload = decode(_ENVELOPE, body, what)
    if name not in types:
        raise ProtocolError(f"unknown {what} {name[:40]!r}")
    unknown = decode(_FIELDS, payload, what).keys() - types[name][1]
    if unknown:
        raise ProtocolError(f"{what} {name} has an unknown field {min(unknown)[:40]!r}")
    return decode(_DECODERS[name], payload, what)
