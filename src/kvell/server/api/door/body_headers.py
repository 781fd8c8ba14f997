"""What a body's headers say of it: that it is JSON, and how it is compressed."""

import asyncio
import zlib
from collections.abc import Iterable

from kvell.server.api.http_errors import ApiError, invalid_request

Headers = Iterable[tuple[bytes, bytes]]
_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 47}
"""What zlib calls each format."""
_LONGEST_VALUE = 64


def refused_type(headers: Headers) -> ApiError | None:
    """The error of a body that is said not to be JSON; None if it is, or nothing is said."""
    kind = header_of(headers, b"content-type").partition(b";")[0].strip().lower()
    if not kind or kind == b"application/json" or kind.endswith(b"+json"):
        return None
    return _unsupported("content-type", kind, "is not JSON; use application/json")


def encoding_of(headers: Headers) -> bytes:
    """How a body is compressed; empty if it is not."""
    value = header_of(headers, b"content-encoding").strip().lower()
    return b"" if value == b"identity" else value


def refused_encoding(encoding: bytes) -> ApiError | None:
    """The error of a compression that is not served."""
    if not encoding or encoding in _WINDOWS:
        return None
    return _unsupported("content-encoding", encoding, "is not served; use gzip, deflate or none")


async def decoded(body: bytes, encoding: bytes, most_bytes: int) -> bytes | ApiError | None:
    """A compressed body as it was before, in a thread; None if it is longer than ``most_bytes``.

    No more than that is ever made of it, however much it would become.
    """
    return await asyncio.to_thread(_decoded, body, encoding, most_bytes)


def json_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers of a body that was read and is plain JSON now."""
    told = (b"content-type", b"content-encoding", b"content-length")
    rest = [(name, value) for name, value in headers if name not in told]
    return [*rest, (b"content-type", b"application/json")]


def _decoded(body: bytes, encoding: bytes, most_bytes: int) -> bytes | ApiError | None:
    reader = zlib.decompressobj(_WINDOWS[encoding])
    try:
        found = reader.decompress(body, most_bytes + 1)
    except zlib.error:
        found = b""
    if len(found) > most_bytes:
        return None
    if not reader.eof or reader.unused_data:
        return invalid_request(
            f"content-encoding={encoding.decode()}: the body is not a whole one of this kind; "
            "compress all of it at once, or send it as it is",
            "content-encoding",
        )
    return found


def _unsupported(name: str, value: bytes, problem: str) -> ApiError:
    shown = value[:_LONGEST_VALUE].decode("ascii", "replace")
    return invalid_request(f"{name}={shown}: {problem}", name, status=415)


def header_of(headers: Headers, name: bytes) -> bytes:
    """The value of a header, by its name in small letters; empty if it is not there."""
    return next((value for key, value in headers if key == name), b"")
