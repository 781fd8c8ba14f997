"""Long bodies: made and written piece by piece, the same JSON; kept in arrays, and bounded."""

import asyncio
import json
import sys
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import StreamingResponse

from kvell.clock import VirtualClock
from kvell.engine.protocol.logprobs import KeptLogprobs, TokenLogprobs, count_numbers
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.turns import EqualParts
from kvell.errors import ChangeSomething, TryLater
from kvell.server.access.visit import RequestContext
from kvell.server.api.bodies.completions import (
    PIECE_BYTES,
    SLICE,
    Lazy,
    event_pieces,
    is_long,
    json_pieces,
    json_response,
)
from kvell.server.api.serving import (
    BYTES_PER_NUMBER,
    EXPECTED_TOKENS,
    STEP_BYTES,
    TOKEN_BYTES,
    KeptAnswer,
)
from kvell.server.text.text_bounds import AnswerMemory
from kvell.server.text.text_stream import TextDelta
from tests.depth import some

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


def lazy(value: Any) -> Any:
    if isinstance(value, list):
        return Lazy(lazy(each) for each in value)
    return {k: lazy(v) for k, v in value.items()} if isinstance(value, dict) else value


@some()
@given(JSON)
def test_pieces_are_the_json_of_the_whole(value: Any) -> None:
    for made in (value, lazy(value)):
        assert json.loads(b"".join(json_pieces(made))) == value


def test_what_is_not_written_yet_is_not_made_yet() -> None:
    made = []

    def elements() -> Iterator[str]:
        for number in range(100):
            made.append(number)
            yield "x" * PIECE_BYTES

    pieces = json_pieces({"data": Lazy(elements())})
    next(pieces)
    assert len(made) == 1
    next(pieces)
    assert len(made) == 2


async def test_others_have_their_turn_between_the_pieces() -> None:
    turns, order = 5, list[str]()

    async def others() -> None:
        for _ in range(turns):
            order.append("other")
            await asyncio.sleep(0)

    body = {"data": Lazy("x" * PIECE_BYTES for _ in range(turns))}
    response = json_response(body)
    assert isinstance(response, StreamingResponse)
    running = asyncio.create_task(others())
    async for _ in response.body_iterator:
        order.append("piece")
    async for _ in event_pieces({"data": Lazy("x" * PIECE_BYTES for _ in range(turns))}):
        pass
    await running
    assert "other" in order[: order.index("piece") + 2]
    assert order.index("other", 2) < len(order) - turns


def test_a_short_body_says_its_length() -> None:
    response = json_response({"data": Lazy([1, 2])}, 201)
    assert (response.body, response.status_code) == (b'{"data":[1,2]}', 201)
    assert response.headers["content-length"] == "14"


LIKELY = st.builds(
    TokenLogprobs,
    st.floats(-50, 0),
    st.integers(1, 1 << 17),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(-50, 0)), max_size=3).map(tuple),
)


@some()
@given(st.lists(LIKELY, max_size=6), st.lists(LIKELY, max_size=6), st.slices(6))
def test_arrays_hold_what_tuples_do(
    first: list[TokenLogprobs], second: list[TokenLogprobs], part: slice
) -> None:
    held = KeptLogprobs(first)
    held.extend(KeptLogprobs(second))
    assert list(held) == first + second
    assert list(held[part]) == (first + second)[part]
    assert (held == first) == (not second)
    assert held.numbers == count_numbers(first + second)
    assert not held or held[-1] == (first + second)[-1]


def visit(tenant: str = "a") -> RequestContext:
    return RequestContext("POST", "/", tenant, None, VirtualClock())


def memory(numbers: int, text_bytes: int = 1 << 40) -> AnswerMemory:
    made = AnswerMemory()
    made.logprobs = EqualParts(numbers * BYTES_PER_NUMBER, "logprob_bytes", "bytes are kept")
    made.texts = EqualParts(text_bytes, "answer_bytes", "bytes wait")
    return made


def kept(
    shared: AnswerMemory, asks: RequestContext | None = None, *, frees: bool = False
) -> KeptAnswer:
    return KeptAnswer(asks or visit(), shared, "top_logprobs", frees=frees)


def test_what_is_reserved_is_given_back_with_the_visit() -> None:
    shared, asks = memory(6000), visit()
    asked = [SamplingParams(logprobs=1, prompt_logprobs=3, max_tokens=10)]
    kept(shared, asks).reserve([100], asked, 2)
    assert shared.logprobs.total == (100 * 4 + 2 * 10 * 2) * BYTES_PER_NUMBER
    asks.end(200)
    assert shared.logprobs.total == 0


def test_a_tenant_keeps_no_more_than_its_part_and_another_has_its_own() -> None:
    shared, asked = memory(3000), [SamplingParams(logprobs=4, max_tokens=500)]
    kept(shared, visit("a")).reserve([1], asked, 1)
    with pytest.raises(TryLater, match="bytes are kept") as error:
        kept(shared, visit("a")).reserve([1], asked, 1)
    assert error.value.bound == "logprob_bytes"
    kept(shared, visit("b")).reserve([1], asked, 1)


def test_more_than_any_may_keep_is_refused_by_its_field() -> None:
    asked = [SamplingParams(logprobs=20, max_tokens=500)] * 500
    with pytest.raises(ChangeSomething, match="top_logprobs=5250000 log probabilities") as error:
        kept(memory(1 << 40)).reserve([1] * 500, asked, 1)
    assert error.value.bound == "logprob_bytes"


def test_longer_answers_find_room_as_they_come_or_fail() -> None:
    shared, asks = memory(2 * EXPECTED_TOKENS * 2), visit()
    room = kept(shared, asks)
    room.reserve([1], [SamplingParams(logprobs=1, max_tokens=1 << 20)], 1)
    made = 0
    with pytest.raises(TryLater):
        while True:
            room.grow(100, 200)
            made += 100
    assert made == 2 * EXPECTED_TOKENS // 100 * 100
    asks.end(429)
    assert shared.logprobs.total == shared.texts.total == 0


def test_a_stream_reserves_as_much_as_waits_to_be_read() -> None:
    shared, likely = memory(4 * EXPECTED_TOKENS), [TokenLogprobs(-1.0, 1, ((1, -1.0),))] * 100
    room = kept(shared, frees=True)
    room.reserve([1], [SamplingParams(logprobs=1, max_tokens=1 << 20)], 1)
    piece = TextDelta("é" * 1000, token_ids=(1,) * 100, logprobs=likely)

    def make() -> None:
        room.grow(100, 200)
        room.add_text(piece.text)

    for _ in range(100):
        make()
        room.on_sent(piece)
    assert shared.texts.total == STEP_BYTES
    for _ in range(10):  # nobody reads
        make()
    assert shared.texts.total >= 10 * (100 * TOKEN_BYTES + 4 * 1000)
    with pytest.raises(TryLater) as error:
        for _ in range(20):
            make()
    assert error.value.bound == "logprob_bytes"


def test_the_bytes_of_arrays_are_counted() -> None:
    for top in (0, 1, 20):
        held = KeptLogprobs()
        for position in range(5000):
            held.extend([TokenLogprobs(-1.0, position, ((5, -1.0),) * top)])
        arrays = [each for each in vars(held).values() if isinstance(each, array)]
        size_bytes = sum(map(sys.getsizeof, arrays))
        assert size_bytes <= held.numbers * BYTES_PER_NUMBER + len(held) * TOKEN_BYTES


@some()
@given(st.text(min_size=SLICE, max_size=3 * SLICE) | st.just('\ud7ff\U0001f642"\\\n\0' * SLICE))
def test_a_long_text_is_written_in_pieces(text: str) -> None:
    pieces = list(json_pieces({"text": text * 20, "more": [1, {"deep": [text, 2]}]}))
    assert json.loads(b"".join(pieces)) == {"text": text * 20, "more": [1, {"deep": [text, 2]}]}
    assert max(map(len, pieces)) <= PIECE_BYTES + 6 * SLICE


@pytest.mark.parametrize("count", [0, 1, SLICE, 5 * SLICE + 1])
def test_long_lists_of_numbers_are_written_in_pieces(count: int) -> None:
    numbers = [1 << 20] * count
    for made in (numbers, tuple(numbers), array("i", numbers), np.array(numbers, np.int32)):
        pieces = list(json_pieces({"data": made}))
        assert json.loads(b"".join(pieces)) == {"data": numbers}
        assert max(map(len, pieces)) <= PIECE_BYTES + 8 * SLICE
    mixed = [*numbers, "x" * PIECE_BYTES]
    assert json.loads(b"".join(json_pieces(mixed))) == mixed


def test_what_must_be_written_in_pieces_is_found() -> None:
    assert not is_long({"a": "x" * PIECE_BYTES, "b": [{"c": 1.5}, None]})
    for value in ("x" * (PIECE_BYTES + 1), Lazy(()), [0] * (SLICE + 1), array("i")):
        assert is_long({"a": [{"b": value}]})
