"""Server-sent events, merged streams, and clients that disconnect."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from kvell.server.api.http_errors import api_error

Item = TypeVar("Item")
DONE = b"data: [DONE]\n\n"
STREAM_TYPE = "text/event-stream"
LINES_TYPE = "application/x-ndjson"
DESCRIBED: Mapping[int | str, dict[str, Any]] = MappingProxyType(
    {200: {"description": "The answer, whole or as a stream", "content": {STREAM_TYPE: {}}}}
)
"""Responses of routes that can stream, for the OpenAPI document."""
QUEUED_PER_STREAM = 16
COMMENT = b": the prompt is being computed\n\n"
"""A comment of server-sent events, which clients ignore."""
COMMENT_SECONDS = 15.0


def sse(payload: Any) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


class EventStream(StreamingResponse):
    """A response that closes its source when the client disconnects."""

    def __init__(self, events: AsyncGenerator[bytes, None], media_type: str = STREAM_TYPE) -> None:
        super().__init__(events, media_type=media_type)
        self.headers["Cache-Control"] = "no-cache"
        self._events = events

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


async def cancel_all(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def prime(
    stream: AsyncGenerator[Item, None],
    when_accepted: Callable[[Callable[[], object]], None],
    comment: Item | None = None,
    failure: Callable[[Exception], Item] | None = None,
) -> AsyncGenerator[Item, None]:
    """Return the stream when its request is accepted, or its first item has arrived.

    An error before that is raised here, where it can still set the HTTP status.

    :param when_accepted: gets a function to call when the request is accepted.
    :param comment: sent each ``COMMENT_SECONDS`` until the first item, so that neither clients nor
        proxies give up; None for formats without comments.
    :param failure: returns the last item after a later error; None: such an error is raised.
    """
    first = asyncio.ensure_future(anext(stream))
    accepted: asyncio.Future[Item] = asyncio.get_running_loop().create_future()
    when_accepted(accepted.cancel)
    try:
        await asyncio.wait([first, accepted], return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            first.result()
    except BaseException:
        await cancel_all(first)
        await stream.aclose()
        raise
    return _after(first, stream, comment, failure)


async def _after(
    first: "asyncio.Future[Item]",
    stream: AsyncGenerator[Item, None],
    comment: Item | None,
    failure: Callable[[Exception], Item] | None,
) -> AsyncGenerator[Item, None]:
    try:
        while not first.done():
            await asyncio.wait([first], timeout=COMMENT_SECONDS)
            if comment is not None and not first.done():
                yield comment
        yield first.result()
        async for item in stream:
            yield item
    except Exception as error:
        if failure is None:
            raise
        yield failure(error)
    finally:
        if not first.done():
            await cancel_all(first)
        await stream.aclose()


def error_event(error: Exception) -> bytes:
    """Return the event that ends a stream after a failure."""
    return sse(api_error(error).body())


def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Return the items of several streams as they arrive; the first failure ends all streams."""
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    arrived: asyncio.Queue[Item | Exception | None] = asyncio.Queue(
        QUEUED_PER_STREAM * len(streams)
    )
    pumps = [asyncio.create_task(_pump(stream, arrived)) for stream in streams]
    running = len(pumps)
    try:
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        await cancel_all(*pumps)


async def _pump(
    stream: AsyncGenerator[Item, None], arrived: "asyncio.Queue[Item | Exception | None]"
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await arrived.put(item)
        await arrived.put(None)
    except Exception as error:
        await arrived.put(error)
