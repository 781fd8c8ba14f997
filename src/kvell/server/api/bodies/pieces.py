"""Long bodies, written in pieces so that they do not block the event loop.

No piece is much longer than :data:`PIECE_BYTES`, so a connection buffers as little for a client
that reads slowly.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from fastapi import Response
from starlette.responses import StreamingResponse

PIECE_BYTES = 1 << 14
"""Approximate bytes of JSON that are written in one turn of the event loop."""
SLICE = 1 << 10
"""Numbers of a list, or characters of a string, that are written together."""
JSON_TYPE = "application/json"
_PLAIN = (int, float, bool, type(None))


class Lazy:
    """A list in a body whose elements are made while they are written.

    It can be read as often as ``elements``.
    """

    def __init__(self, elements: Iterable[object]) -> None:
        self.elements = elements


def json_pieces(value: object) -> Iterator[bytes]:
    """Yield a value as JSON, in pieces of about :data:`PIECE_BYTES`."""
    piece = bytearray()
    for part in _parts(value):
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def json_response(body: Mapping[str, object], status: int = 200) -> Response:
    pieces = json_pieces(body)
    begin, rest = next(pieces), next(pieces, None)
    if rest is None:
        return Response(begin, status, media_type=JSON_TYPE)
    return StreamingResponse(_in_turns(begin, rest, pieces), status, media_type=JSON_TYPE)


async def event_pieces(
    payload: Mapping[str, object], begin: bytes = b"data: ", end: bytes = b"\n\n"
) -> AsyncGenerator[bytes, None]:
    """Yield one event of a stream, in pieces.

    :param begin: bytes before its JSON.
    :param end: bytes after its JSON.
    """
    for piece in json_pieces(payload):
        yield begin + piece
        begin = b""
        if len(piece) >= PIECE_BYTES:
            await asyncio.sleep(0)
    yield end


def is_long(value: object) -> bool:
    """Return whether a value must be written in pieces: a part of it is long or made lazily."""
    if isinstance(value, str):
        return len(value) > PIECE_BYTES
    if isinstance(value, dict):
        return any(map(is_long, value.values()))
    if isinstance(value, list | tuple):
        return len(value) > SLICE or any(map(is_long, value))
    return isinstance(value, Lazy | array | np.ndarray | msgspec.Raw)


async def _in_turns(*pieces: bytes | Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    for part in pieces:
        for piece in [part] if isinstance(part, bytes) else part:
            yield piece
            await asyncio.sleep(0)  # sending does not yield while there is room


def _parts(value: object) -> Iterator[bytes]:
    """Yield a value as JSON; values that may be long are split."""
    if isinstance(value, str) and len(value) > SLICE:
        yield from _text_parts(value)
    elif isinstance(value, Lazy):
        yield from _listed(value.elements)
    elif isinstance(value, dict):
        before = b"{"
        for name, each in value.items():
            yield before + msgspec.json.encode(name) + b":"
            yield from _parts(each)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, array | np.ndarray):
        yield from _slices(value[at : at + SLICE].tolist() for at in range(0, len(value), SLICE))
    elif isinstance(value, msgspec.Raw):
        written = memoryview(value)
        for at in range(0, len(written), PIECE_BYTES):
            yield bytes(written[at : at + PIECE_BYTES])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if all(type(each) in _PLAIN for each in value):
            yield from _slices(value[at : at + SLICE] for at in range(0, len(value), SLICE))
        else:
            yield from _listed(value)
    else:
        yield msgspec.json.encode(value)


def _text_parts(text: str) -> Iterator[bytes]:
    yield b'"'
    for at in range(0, len(text), SLICE):
        yield msgspec.json.encode(text[at : at + SLICE])[1:-1]
    yield b'"'


def _slices(slices: Iterable[Sequence[object]]) -> Iterator[bytes]:
    before = b"["
    for each in slices:
        yield before + msgspec.json.encode(each)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


def _listed(elements: Iterable[object]) -> Iterator[bytes]:
    before = b"["
    for each in elements:
        yield before
        yield from _parts(each)
        before = b","
    yield b"[]" if before == b"[" else b"]"
