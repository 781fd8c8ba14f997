"""Streams merged, primed and closed, whatever goes wrong in the middle."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import pytest
from starlette.requests import Request
from starlette.responses import Response

from kvell.errors import TryLater
from kvell.server.api import streaming
from kvell.server.api.serving import cancel_on_disconnect
from kvell.server.api.streaming import (
    error_event,
    merge,
    prime,
    sse,
)

T = TypeVar("T")


class Source:
    """Counts from ``first`` up to ``end``, then fails if it has an error to raise.

    :ivar closed: whether its items were closed.
    """

    def __init__(self, end: int, error: Exception | None = None, first: int = 0) -> None:
        self._items = range(first, end)
        self._error = error
        self.closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for item in self._items:
                await asyncio.sleep(0)
                yield item
            if self._error:
                raise self._error
        finally:
            self.closed = True


def run(scenario: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(10):
            return await scenario

    return asyncio.run(bounded())


async def drained(items: AsyncGenerator[Any, None]) -> None:
    async for _ in items:
        pass


def request_whose_client(leaves: bool) -> Request:
    async def receive() -> dict[str, str]:
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "headers": []}, receive)


def test_merging_keeps_each_streams_order() -> None:
    sources = [Source(3), Source(0), Source(140, first=100)]

    async def scenario() -> list[int]:
        return [item async for item in merge([source.items() for source in sources])]

    items = run(scenario())
    assert [item for item in items if item < 100] == [0, 1, 2]
    assert [item for item in items if item >= 100] == list(range(100, 140))


def test_a_failing_stream_ends_the_others() -> None:
    endless, failing = Source(1 << 60), Source(2, TryLater("full"))

    async def scenario() -> None:
        await drained(merge([endless.items(), failing.items()]))

    with pytest.raises(TryLater, match="full"):
        run(scenario())
    assert endless.closed
    assert failing.closed


async def test_a_single_stream_is_merged_with_none() -> None:
    source, failing = Source(3), Source(2, TryLater("full"))
    items = [item async for item in merge([source.items()])]
    with pytest.raises(TryLater, match="full"):
        await drained(merge([failing.items()]))
    assert items == [0, 1, 2]
    assert source.closed
    assert failing.closed


@pytest.mark.parametrize("count", [1, 2])
async def test_leaving_a_merge_closes_every_stream(count: int) -> None:
    sources = [Source(1 << 60) for _ in range(count)]
    stream = merge([source.items() for source in sources])
    await anext(stream)
    await stream.aclose()
    assert all(source.closed for source in sources)


def never(_call: Callable[[], object]) -> None:
    """No instance accepts the request."""


def at_once(call: Callable[[], object]) -> None:
    call()


@pytest.mark.parametrize("fails", [None, TryLater("full")])
def test_an_accepted_stream_begins_before_its_first_item(fails: TryLater | None) -> None:
    ready = asyncio.Event()

    async def items() -> AsyncGenerator[str, None]:
        await ready.wait()
        if fails is not None:
            raise fails
        yield "first"

    async def scenario() -> list[str]:
        stream = await prime(items(), at_once, "comment")
        ready.set()
        return [item async for item in stream]

    if fails is None:
        assert run(scenario()) == ["first"]
    else:
        with pytest.raises(TryLater):
            run(scenario())


def test_a_stream_has_comments_until_its_first_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "COMMENT_SECONDS", 0.001)
    ready = asyncio.Event()
    source = Source(2)

    async def items() -> AsyncGenerator[int, None]:
        await ready.wait()
        async with aclosing(source.items()) as each:
            async for item in each:
                yield item

    async def scenario() -> list[int]:
        stream = await prime(items(), at_once, -1)
        shown = [await anext(stream), await anext(stream)]
        ready.set()
        return [*shown, *[item async for item in stream if item >= 0]]

    assert run(scenario()) == [-1, -1, 0, 1]
    assert source.closed


async def test_an_accepted_stream_that_is_left_closes_its_source() -> None:
    closed: list[bool] = []

    async def items() -> AsyncGenerator[int, None]:
        try:
            await asyncio.Event().wait()
            yield 0
        finally:
            closed.append(True)

    stream = await prime(items(), at_once, -1)
    begun = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    begun.cancel()
    await asyncio.wait([begun])
    await stream.aclose()
    assert closed == [True]


async def test_priming_loses_no_item_and_closes_its_source() -> None:
    source, left = Source(3), Source(3)
    items = [item async for item in await prime(source.items(), never)]
    stream = await prime(left.items(), never)
    await anext(stream)
    await stream.aclose()
    assert items == [0, 1, 2]
    assert source.closed
    assert left.closed


def test_what_fails_before_the_first_item_is_raised_while_priming() -> None:
    source = Source(0, TryLater("full"))

    async def scenario() -> None:
        await prime(source.items(), never)

    with pytest.raises(TryLater):
        run(scenario())
    assert source.closed


async def events(count: int, error: Exception | None = None) -> AsyncGenerator[bytes, None]:
    async for item in Source(count, error).items():
        yield sse({"item": item})


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (TryLater("full"), b'"rate_limit_error"'),
        (RuntimeError("inside"), b'"internal error"'),
    ],
)
async def test_a_stream_that_fails_later_ends_with_an_error_event(
    error: Exception, last: bytes
) -> None:
    stream = await prime(events(2, error), never, failure=error_event)
    found = [event async for event in stream]
    assert found[:2] == [b'data: {"item":0}\n\n', b'data: {"item":1}\n\n']
    assert len(found) == 3
    assert last in found[-1]
    assert found[-1].endswith(b"\n\n")
    assert b"inside" not in found[-1]


def test_an_answer_comes_while_the_client_stays() -> None:
    async def answer() -> Response:
        await asyncio.sleep(0)
        return Response("answer")

    async def scenario() -> Response:
        return await cancel_on_disconnect(request_whose_client(leaves=False), answer())

    assert run(scenario()).body == b"answer"


def test_an_answers_error_passes_through() -> None:
    async def answer() -> Response:
        raise TryLater("full")

    async def scenario() -> Response:
        return await cancel_on_disconnect(request_whose_client(leaves=False), answer())

    with pytest.raises(TryLater):
        run(scenario())


def test_a_client_that_leaves_cancels_the_answer() -> None:
    cancelled = []

    async def answer() -> Response:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return Response()

    async def scenario() -> Response:
        return await cancel_on_disconnect(request_whose_client(leaves=True), answer())

    assert run(scenario()).status_code == 499
    assert cancelled == [True]
