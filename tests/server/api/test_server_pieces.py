"""Long bodies: made and written piece by piece, the same JSON; kept in arrays, and bounded."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import StreamingResponse

from kvell.clock import VirtualClock
from kvell.engine.protocol.logprobs import KeptLogprobs, TokenLogprobs, count_numbers
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.equal_parts import EqualParts
from kvell.errors import ChangeSomething, TryLater
from kvell.server.access.visit import RequestContext
from kvell.server.api.bodies.pieces import (
    PIECE_BYTES,
    Lazy,
    event_pieces,
    json_pieces,
    json_response,
)
from kvell.server.api.kept_likely import BYTES_PER_NUMBER, EXPECTED_TOKENS, KeptLikely
from kvell.server.text.text_stream import TextDelta
from tests.depth import some

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


def lazy(value: Any) -> Any:
    """The same, with every list made lazily."""
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


def test_others_have_their_turn_between_the_pieces() -> None:
    turns, order = 5, list[str]()

    async def others() -> None:
        for _ in range(turns):
            order.append("other")
            await asyncio.sleep(0)

    async def scenario() -> None:
        body = {"data": Lazy("x" * PIECE_BYTES for _ in range(turns))}
        response = json_response(body)
        assert isinstance(response, StreamingResponse)
        running = asyncio.create_task(others())
        async for _ in response.body_iterator:
            order.append("piece")
        async for _ in event_pieces({"data": Lazy("x" * PIECE_BYTES for _ in range(turns))}):
            pass
        await running

    asyncio.run(scenario())
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


def pool(numbers: int) -> EqualParts:
    return EqualParts(numbers * BYTES_PER_NUMBER, "logprob_bytes", "bytes are kept")


def test_what_is_reserved_is_given_back_with_the_visit() -> None:
    shared, asks = pool(6000), visit()
    likely = KeptLikely(asks, shared, "logprobs")
    likely.reserve([100], [SamplingParams(logprobs=1, prompt_logprobs=3, max_tokens=10)], 2)
    assert shared.total == (100 * 4 + 2 * 10 * 2) * BYTES_PER_NUMBER
    asks.end(200)
    assert shared.total == 0


def test_a_tenant_keeps_no_more_than_its_part_and_another_has_its_own() -> None:
    shared, asked = pool(3000), [SamplingParams(logprobs=4, max_tokens=500)]
    KeptLikely(visit("a"), shared, "logprobs").reserve([1], asked, 1)
    with pytest.raises(TryLater, match="bytes are kept") as error:
        KeptLikely(visit("a"), shared, "logprobs").reserve([1], asked, 1)
    assert error.value.bound == "logprob_bytes"
    KeptLikely(visit("b"), shared, "logprobs").reserve([1], asked, 1)


def test_more_than_any_may_keep_is_refused_by_its_field() -> None:
    asked = [SamplingParams(logprobs=20, max_tokens=500)] * 500
    with pytest.raises(ChangeSomething, match="top_logprobs=5250000 log probabilities") as error:
        KeptLikely(visit(), pool(1 << 40), "top_logprobs").reserve([1] * 500, asked, 1)
    assert error.value.bound == "logprob_bytes"


def test_longer_answers_find_room_as_they_come_or_fail() -> None:
    shared, asks = pool(2 * EXPECTED_TOKENS * 2), visit()
    likely = KeptLikely(asks, shared, "logprobs")
    likely.reserve([1], [SamplingParams(logprobs=1, max_tokens=1 << 20)], 1)
    told = (TokenLogprobs(-1.0, 1, ((1, -1.0),)),) * 100

    async def deltas() -> Any:
        for _ in range(1000):
            yield 0, TextDelta("x", logprobs=told)

    async def count() -> int:
        passed = 0
        with pytest.raises(TryLater):
            async for _ in likely.follow(deltas()):
                passed += 1
        return passed

    assert asyncio.run(count()) == 2 * EXPECTED_TOKENS // 100
    asks.end(429)
    assert shared.total == 0
