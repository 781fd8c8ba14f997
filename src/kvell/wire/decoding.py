"""Bytes that others wrote, as messages and records: one error for whatever is wrong with them."""

from typing import Protocol, TypeVar

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
        raise MalformedError(f"malformed {name}: {error}") from error
