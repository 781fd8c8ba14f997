"""Server-sent events, several requests as one stream, and clients that go away."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Send

from kvell.server.api.http_errors import api_error

Item = TypeVar("Item")
DONE = b"data: [DONE]\n\n"
STREAM_TYPE = "text/event-stream"
DESCRIBED: Mapping[int | str, dict[str, Any]] = MappingProxyType(
    {200: {"description": "The answer, whole or as a stream", "content": {STREAM_TYPE: {}}}}
)
"""Answers of routes that can stream, for the app's own description of itself."""
QUEUED_PER_STREAM = 16


class ClientGone(Exception):  # noqa: N818 - nobody is left to read an error
    """The client closed its connection before the answer began."""


def sse(payload: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def named_event(event: Mapping[str, Any]) -> bytes:
    """One event of a stream, whose name is its type."""
    name = str(event["type"]).encode()
    return b"event: " + name + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


class EventStream(StreamingResponse):
    """A response that ends its source as soon as the client goes away."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type=STREAM_TYPE)
        self.headers["Cache-Control"] = "no-cache"
        self._events = events

    async def stream_response(self, send: Send) -> None:
        """Send all events; the source is closed here, not when it is collected."""
        async with aclosing(self._events):
            await super().stream_response(send)


async def until_gone(request: Request, answer: Awaitable[Item]) -> Item:
    """Wait for an answer unless the client leaves first, which cancels it.

    The request's body must have been read.

    :raises ClientGone: when the client left.
    """
    working = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _cancelled(working, watching)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def primed(stream: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """The same stream with its first item already there.

    What goes wrong before the first item is raised here, while there still is an
    HTTP status to say it with.
    """
    try:
        first = await anext(stream)
    except BaseException:
        await stream.aclose()
        raise
    return _after(first, stream)


async def _after(first: Item, stream: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    async with aclosing(stream):
        yield first
        async for item in stream:
            yield item


async def with_error_event(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Events, ``[DONE]`` behind them; a failure becomes an error event instead."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
            yield DONE
        except Exception as error:
            yield sse(api_error(error).body())


async def merged(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of several streams as they come, each with its stream's index.

    The first failure ends all of them.
    """
    if len(streams) == 1:  # nothing to wait for side by side
        async with aclosing(streams[0]) as only:
            async for single in only:
                yield 0, single
        return
    arrived: asyncio.Queue[tuple[int, Item | Exception | None]] = asyncio.Queue(
        QUEUED_PER_STREAM * len(streams)
    )
    pumps = [asyncio.create_task(_pump(i, s, arrived)) for i, s in enumerate(streams)]
    running = len(pumps)
    try:
        while running:
            index, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        await _cancelled(*pumps)


async def _pump(
    index: int,
    stream: AsyncGenerator[Item, None],
    arrived: "asyncio.Queue[tuple[int, Item | Exception | None]]",
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await arrived.put((index, item))
        await arrived.put((index, None))
    except Exception as error:
        await arrived.put((index, error))
