"""Decoding of untrusted bytes as messages and records, with one error for all faults."""

import errno
import json
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from kvell.errors import KvellError
from kvell.wire.frames import ProtocolError

Message = TypeVar("Message")
Message_co = TypeVar("Message_co", covariant=True)
FAULTS = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, KvellError)
"""The errors that decoders raise. Errors of msgspec and of UTF-8 are ValueErrors, deep nesting is a
RecursionError, and records raise KvellError when they validate themselves."""


MAX_FILE_BYTES = 1 << 20
"""The largest file of settings, keys or figures."""
MOST_TOML_DOTS = 32
"""The most dots in a line of TOML: reading a key takes the square of its dots."""


class Decoder(Protocol[Message_co]):
    """A decoder of msgspec."""

    def decode(self, data: bytes, /) -> Message_co:
        """Read one message."""
        ...


class MalformedError(ProtocolError):
    """The bytes cannot be decoded as expected."""


def decode(decoder: Decoder[Message], data: bytes, name: str = "message") -> Message:
    """Read one message.

    :param name: the expected content, for the error message.
    :raises MalformedError: when the bytes cannot be decoded, for any reason.
    """
    try:
        return decoder.decode(data)
    except FAULTS as error:
        raise MalformedError(_problem(name, error)) from error


def decode_packaged(kind: type[Message], package: str, name: str) -> Message:
    """Read a file of JSON that lies in a package of Kvell."""
    data = resources.files(package).joinpath(name).read_bytes()
    return decode(msgspec.json.Decoder(kind), data, name)


def decode_json(
    text: str | bytes,
    name: str = "JSON",
    *,
    hook: Callable[[Any], object] | None = None,
    constant: Callable[[str], object] | None = None,
    strict: bool = True,
) -> Any:
    """Read JSON of any shape. As with ``json.loads``, infinities and NaN are accepted.

    :param strict: whether control characters in strings are errors.
    :raises MalformedError: when the text cannot be decoded, for any reason.
    """
    try:
        return json.loads(text, object_hook=hook, parse_constant=constant, strict=strict)
    except FAULTS as error:
        raise MalformedError(_problem(name, error)) from error


def has_more_values(json_text: str | bytes, most_values: int) -> bool:
    """Return whether JSON may have more lists, objects and fields than ``most_values``.

    Numbers in a list are not counted.
    """
    if len(json_text) <= most_values:
        return False
    if isinstance(json_text, bytes):
        return sum(map(json_text.count, (b"[", b"{", b":"))) > most_values
    return sum(map(json_text.count, "[{:")) > most_values


def read_bounded(file: Path, most_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a small file.

    :raises OSError: if it cannot be read, or has more bytes.
    """
    with file.expanduser().open("rb") as stream:
        data = stream.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(file))
    return data


def decode_toml(text: str, name: str = "TOML") -> dict[str, object]:
    """Read TOML.

    :raises MalformedError: when the text cannot be decoded, for any reason.
    """
    if max((line.count(".") for line in text.splitlines()), default=0) > MOST_TOML_DOTS:
        raise MalformedError(f"malformed {name}: a line has more than {MOST_TOML_DOTS} dots")
    try:
        return tomllib.loads(text)
    except FAULTS as error:
        raise MalformedError(_problem(name, error)) from error


def _problem(name: str, error: Exception) -> str:
    deep = "it is nested too deeply" if isinstance(error, RecursionError) else error
    return f"malformed {name}: {deep}"
