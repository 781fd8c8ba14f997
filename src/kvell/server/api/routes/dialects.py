"""Answers in the formats of other APIs than OpenAI's chat: what their routes share."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import ClassVar

import msgspec
from fastapi import Response

from kvell.server.access.visit import RequestContext
from kvell.server.api.bodies.completions import Body, event_pieces, is_long, json_response
from kvell.server.api.http_errors import ApiError, api_error
from kvell.server.api.serving import Deltas
from kvell.server.api.streaming import COMMENT, STREAM_TYPE, EventStream, prime
from kvell.server.text.text_stream import TextDelta, Usage


class DialectAnswer(ABC):
    """An answer that grows while its pieces are read.

    :ivar usage: the sum of the usage of the pieces so far.
    :ivar last: the latest piece; None before the first.
    """

    media_type: ClassVar[str] = STREAM_TYPE
    comment: ClassVar[bytes | None] = COMMENT

    def __init__(self, deltas: Deltas, visit: RequestContext) -> None:
        self._deltas, self._visit = deltas, visit
        self.usage = Usage()
        self.last: TextDelta | None = None

    def begin(self) -> Sequence[Body]:
        """Return the events before those of the first piece."""
        return ()

    @abstractmethod
    def read(self, delta: TextDelta) -> Sequence[Body]:
        """Return the events of a piece."""

    @abstractmethod
    async def end(self) -> tuple[Sequence[Body], Body]:
        """Return the events after those of the last piece, and the body of the whole answer."""

    @abstractmethod
    def fail(self, error: ApiError) -> Body:
        """Return the event of a failure after the request was accepted."""

    def frame(self, event: Body) -> tuple[bytes, bytes]:
        """Return the bytes before and after the JSON of an event."""
        return b"event: " + str(event["type"]).encode() + b"\ndata: ", b"\n\n"

    async def response(self, *, streams: bool) -> Response:
        """Read the pieces, and return the answer, whole or as a stream."""
        if streams:
            events = await prime(self._written(), self._visit.when_accepted, self.comment)
            return EventStream(events, self.media_type)
        async with aclosing(self._deltas) as deltas:
            async for _, delta in deltas:
                self._take(delta)
        _, body = await self.end()
        return json_response(body)

    async def events(self) -> AsyncGenerator[Body, None]:
        """Yield all events; a failure of an accepted request becomes an event."""
        try:
            async with aclosing(self._deltas) as deltas:
                async for _, delta in deltas:
                    begun = self.begin() if self.last is None else ()
                    for event in (*begun, *self._take(delta)):
                        yield event
            events, _ = await self.end()
            for event in events:
                yield event
        except Exception as error:
            if self.last is None and not self._visit.is_accepted:
                raise
            yield self.fail(api_error(error))

    def _take(self, delta: TextDelta) -> Sequence[Body]:
        self.usage += delta.usage
        self.last = delta
        return self.read(delta)

    async def _written(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.events()) as events:
            async for event in events:
                before, after = self.frame(event)
                if is_long(event):
                    async for piece in event_pieces(event, before, after):
                        yield piece
                else:
                    yield before + msgspec.json.encode(event) + after
