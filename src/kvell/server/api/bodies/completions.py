"""Bodies of text completions, and fields that all bodies of answers share.

Long bodies, written in pieces so that they do not block the event loop.

No piece is much longer than :data:`PIECE_BYTES`, so a connection buffers as little for a client
that reads slowly.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from fastapi import Response
from starlette.responses import StreamingResponse

from kvell.server.text.text_bounds import ContextLength
from kvell.server.text.text_stream import TextDelta, Usage

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


Body = dict[str, Any]


@dataclass(frozen=True)
class Heading:
    """The fields that all bodies of one answer repeat.

    :param tells_token_ids: whether choices have the ids of their tokens as well as the text.
    """

    answer_id: str
    model: str
    created: int
    tells_token_ids: bool = False

    def choice(
        self, index: int, delta: TextDelta, logprobs: Body | None = None, /, **content: Any
    ) -> Body:
        """Return a choice with the new part of an answer."""
        token_ids = {"token_ids": list(delta.token_ids)} if self.tells_token_ids else {}
        return {
            "index": index,
            **content,
            **token_ids,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def body(self, kind: str, choices: Sequence[Body] | Lazy, **more: Any) -> Body:
        head = {"id": self.answer_id, "object": kind, "created": self.created}
        return {**head, "model": self.model, "choices": choices, **more}

    def chunk(self, kind: str, choice: Body, used: Usage | None) -> Body:
        """Return a piece of a stream, with the usage so far if that is given."""
        return self.body(kind, [choice], **({} if used is None else {"usage": usage_body(used)}))


def usage_body(usage: Usage, reasoning_tokens: int | None = None) -> Body:
    """Return OpenAI's ``usage``; cached tokens were not computed again.

    :param reasoning_tokens: None if the answer's reasoning is not separated.
    """
    details: Body = {}
    if reasoning_tokens is not None:
        tokens = min(reasoning_tokens, usage.completion_tokens)
        details["completion_tokens_details"] = {"reasoning_tokens": tokens}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": cache_details(usage),
        **details,
    }


def cache_details(usage: Usage) -> Body:
    """Return the numbers of prompt tokens read from the cache and written to the cache."""
    return {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens}


def model_card(
    name: str, length: ContextLength, created: int, takes_tools: bool | None = None
) -> Body:
    """Return OpenAI's description of a model, with vLLM's ``max_model_len``.

    ``max_model_len`` is the limit of one instance; ``reach_tokens`` includes borrowed memory.

    :param takes_tools: whether the chat template shows tools; None if there is no template.
    """
    card = {"id": name, "object": "model", "created": created, "owned_by": "kvell"}
    reach_tokens = length.reach_tokens
    card |= {"max_model_len": length.alone_tokens, "reach_tokens": reach_tokens}
    return {**card, "chat_template_takes_tools": takes_tools}
