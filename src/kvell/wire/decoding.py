"""Bytes that others wrote, as messages and records: one error for whatever is wrong with them."""

import json
import tomllib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kvell.errors import KvellError
from kvell.wire.frames import ProtocolError

Message = TypeVar("Message")
Message_co = TypeVar("Message_co", covariant=True)
FAULTS = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, KvellError)
"""What decoders raise: msgspec's errors are ValueErrors, as is that of a text that is not UTF-8; it
gives up on bytes that nest too deep; and records check themselves."""


class Decoder(Protocol[Message_co]):
    """A decoder of msgspec."""

    def decode(self, data: bytes, /) -> Message_co:
        """Read one message."""
        ...


class MalformedError(ProtocolError):
    """The bytes are not what they should be."""


def decode(decoder: Decoder[Message], data: bytes, name: str = "message") -> Message:
    """Read one message.

    :param name: of what it should be, for the error.
    :raises MalformedError: whatever is wrong with the bytes.
    """
    try:
        return decoder.decode(data)
    except FAULTS as error:
        raise MalformedError(_problem(name, error)) from error


def decode_json(
    text: str | bytes,
    name: str = "JSON",
    *,
    hook: Callable[[Any], object] | None = None,
    constant: Callable[[str], object] | None = None,
    strict: bool = True,
) -> Any:
    """Read JSON of any shape, infinities and NaN too, as ``json.loads`` does.

    :param hook: makes something else of each object.
    :param constant: makes something of ``NaN`` and infinities.
    :param strict: whether control characters in strings are faults.
    :raises MalformedError: whatever is wrong with the text.
    """
    try:
        return json.loads(text, object_hook=hook, parse_constant=constant, strict=strict)
    except FAULTS as error:
        raise MalformedError(_problem(name, error)) from error


def decode_toml(text: str, name: str = "TOML") -> dict[str, object]:
    """Read TOML.

    :raises MalformedError: whatever is wrong with the text.
    """
    try:
        return tomllib.loads(text)
    except FAULTS as error:
        raise MalformedError(_problem(name, error)) from error


def _problem(name: str, error: Exception) -> str:
    deep = "it is nested too deeply" if isinstance(error, RecursionError) else error
    return f"malformed {name}: {deep}"
