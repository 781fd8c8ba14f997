"""The headers of a body: content type and content encoding."""

import zlib
from collections.abc import Iterable

from kvell.server.api.http_errors import ApiError, invalid_request

Headers = Iterable[tuple[bytes, bytes]]
_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 47}
"""zlib's ``wbits`` by content encoding."""
_LONGEST_VALUE = 64


def refused_type(headers: Headers, *, has_body: bool) -> ApiError | None:
    """Return the error of a content type that is not JSON; None if it is JSON.

    Browsers ask a server for permission before they send JSON to it, but send forms, texts and
    bodies without a type unasked.

    :param has_body: whether a body must have a type.
    """
    kind = header_of(headers, b"content-type").partition(b";")[0].strip().lower()
    if kind == b"application/json" or kind.endswith(b"+json") or not (kind or has_body):
        return None
    problem = "is not JSON" if kind else "is missing"
    return _unsupported("content-type", kind, f"{problem}; use application/json")


def encoding_of(headers: Headers) -> bytes:
    """Return the content encoding; empty if the body is not compressed."""
    value = header_of(headers, b"content-encoding").strip().lower()
    return b"" if value == b"identity" else value


def refused_encoding(encoding: bytes) -> ApiError | None:
    """Return the error of a content encoding that is not supported, or None."""
    if not encoding or encoding in _WINDOWS:
        return None
    return _unsupported("content-encoding", encoding, "is not served; use gzip, deflate or none")


def decompress(body: bytes, encoding: bytes, most_bytes: int) -> bytes | ApiError | None:
    """Decompress a body; return None if it is too long, an error if it is malformed.

    At most one byte more than ``most_bytes`` is ever decompressed.
    """
    reader = zlib.decompressobj(_WINDOWS[encoding])
    try:
        plain = reader.decompress(body, most_bytes + 1)
    except zlib.error:
        plain = b""
    if len(plain) > most_bytes:
        return None
    if not reader.eof or reader.unused_data:
        return invalid_request(
            f"content-encoding={encoding.decode()}: the body is incomplete or malformed; "
            "compress the whole body, or send it as it is",
            "content-encoding",
        )
    return plain


def json_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    replaced = (b"content-type", b"content-encoding", b"content-length")
    rest = [(name, value) for name, value in headers if name not in replaced]
    return [*rest, (b"content-type", b"application/json")]


def _unsupported(name: str, value: bytes, problem: str) -> ApiError:
    shown = value[:_LONGEST_VALUE].decode("ascii", "replace")
    return invalid_request(f"{name}={shown}: {problem}", name, status=415)


def header_of(headers: Headers, name: bytes) -> bytes:
    """Return the value of a header by its lower-case name; empty if the header is absent."""
    return next((value for key, value in headers if key == name), b"")
