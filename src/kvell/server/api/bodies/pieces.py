"""Long bodies, written in pieces so that they do not block the event loop."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence

import msgspec
from fastapi import Response
from starlette.responses import StreamingResponse

PIECE_BYTES = 1 << 14
"""Approximate bytes of JSON that are written in one turn of the event loop."""
JSON_TYPE = "application/json"


class Lazy:
    """A list in a body whose elements are made while they are written; it can be read once."""

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
    """Return the body as a response, written in pieces if it is long."""
    pieces = json_pieces(body)
    begin, rest = next(pieces), next(pieces, None)
    if rest is None:
        return Response(begin, status, media_type=JSON_TYPE)
    return StreamingResponse(_in_turns(begin, rest, pieces), status, media_type=JSON_TYPE)


async def event_pieces(payload: Mapping[str, object]) -> AsyncGenerator[bytes, None]:
    """Yield one server-sent event, in pieces."""
    begin = b"data: "
    for piece in json_pieces(payload):
        yield begin + piece
        begin = b""
        if len(piece) >= PIECE_BYTES:
            await asyncio.sleep(0)
    yield b"\n\n"


async def _in_turns(*pieces: bytes | Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    for part in pieces:
        for piece in [part] if isinstance(part, bytes) else part:
            yield piece
            await asyncio.sleep(0)  # sending does not yield while there is room


def _parts(value: object) -> Iterator[bytes]:
    """Yield a value as JSON; values that may be long are split."""
    if isinstance(value, Lazy):
        yield from _listed(value.elements)
    elif isinstance(value, dict):
        before = b"{"
        for name, each in value.items():
            yield before + msgspec.json.encode(name) + b":"
            yield from _parts(each)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Sequence) and value and isinstance(value[0], dict):
        yield from _listed(value)
    else:
        yield msgspec.json.encode(value)


def _listed(elements: Iterable[object]) -> Iterator[bytes]:
    before = b"["
    for each in elements:
        yield before
        yield from _parts(each)
        before = b","
    yield b"[]" if before == b"[" else b"]"
