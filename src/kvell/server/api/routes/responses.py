"""``/v1/responses``: OpenAI's newer form of chat; nothing is stored."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import FastAPI, Request, Response

from kvell.server.access.visit import RequestContext
from kvell.server.api import streaming
from kvell.server.api.bodies.completions import Body, event_pieces, is_long, json_response
from kvell.server.api.bodies.response_items import (
    Event,
    OutputWriter,
    ended_body,
    failed_event,
    response_body,
    response_usage,
)
from kvell.server.api.door.access_guard import visit_of
from kvell.server.api.http_errors import api_error, named_as_sent
from kvell.server.api.routes.chat import ChatApi, ChatStream
from kvell.server.api.schemas.responses import ResponsesRequest
from kvell.server.api.serving import AppState, cancel_on_disconnect
from kvell.server.api.streaming import COMMENT, EventStream, named_begin, named_event, prime
from kvell.server.logs.lines import OncePerName
from kvell.server.text.text_stream import TextDelta, Usage


@dataclass(frozen=True)
class ResponsesApi:
    """The handler of responses.

    :param ignored_tools: logs each type of tool that is left out once.
    :param ignored_items: logs each type of item that is left out once.
    """

    serving: AppState
    ignored_tools: OncePerName = field(default_factory=lambda: OncePerName("tool_left_out", "type"))
    ignored_items: OncePerName = field(default_factory=lambda: OncePerName("item_left_out", "type"))

    def install(self, app: FastAPI) -> None:
        """Add the route."""
        described = dict(streaming.DESCRIBED)
        app.add_api_route("/v1/responses", self.respond, methods=["POST"], responses=described)

    async def respond(self, request: Request, body: ResponsesRequest) -> Response:
        """Answer a conversation, in OpenAI's newer format.

        ``output`` has the reasoning, the message and the calls of the answer as items.  A stream
        has OpenAI's named events, from ``response.created`` to ``response.completed``.  Nothing
        is stored, so every request has the whole conversation.
        """
        return await cancel_on_disconnect(request, self._answer(body, visit_of(request)))

    async def _answer(self, body: ResponsesRequest, visit: RequestContext) -> Response:
        self.serving.note(body)
        self.ignored_tools.note(body.left_out_tools())
        self.ignored_items.note(body.left_out_items())
        with named_as_sent(body.name_here):
            answering = await ChatApi(self.serving).answering(body.chat(), visit, "resp")
            defaults = answering.asked.served.text.sampling_defaults
            response = _Response(body.with_defaults(defaults), answering)
            if body.stream:
                events = await prime(_events(response), visit.when_accepted, COMMENT)
                return EventStream(events)
            async with aclosing(answering.deltas) as deltas:
                async for _, delta in deltas:
                    response.read(delta)
            response.end()
            return json_response(await response.body())


class _Response:
    """A response that grows while its answer is read."""

    def __init__(self, request: ResponsesRequest, answering: ChatStream) -> None:
        self._asked = request
        self._answering = answering
        self._reader = answering.reader(0)
        heading = answering.asked.heading
        self._writer = OutputWriter(
            heading.answer_id, self._reader.call_ids, answering.asked.served.text
        )
        self._usage = Usage()
        self._is_whole = True

    def begun(self) -> Body:
        return response_body(
            self._answering.asked.heading, self._asked, self._answering.tools, "in_progress"
        )

    def read(self, delta: TextDelta) -> list[Event]:
        self._usage += delta.usage
        self._is_whole = delta.finish_reason != "length"
        logprobs = delta.logprobs if self._asked.tells_logprobs() else ()
        return self._writer.write(self._reader.read(delta), delta.token_ids, logprobs)

    def end(self) -> list[Event]:
        return self._writer.close("completed" if self._is_whole else "incomplete")

    async def body(self) -> Body:
        """Return the whole response, after its answer has ended."""
        request = self._answering.asked
        tokens = await self._answering.reasoning_tokens()
        return ended_body(
            request.heading,
            self._asked,
            self._answering.tools,
            self._writer.items,
            response_usage(self._usage, tokens),
            is_whole=self._is_whole,
        )

    async def steps(self) -> AsyncGenerator[Event, None]:
        """Yield all events; a failure of an accepted request becomes an event."""
        is_begun = False
        begun = self.begun()
        try:
            async with aclosing(self._answering.deltas) as deltas:
                async for _, delta in deltas:
                    if not is_begun:
                        is_begun = True
                        yield {"type": "response.created", "response": begun}
                        yield {"type": "response.in_progress", "response": begun}
                    for event in self.read(delta):
                        yield event
            for event in self.end():
                yield event
            body = await self.body()
            yield {"type": f"response.{body['status']}", "response": body}
        except Exception as error:
            if not (is_begun or self._answering.asked.visit.is_accepted):
                raise
            yield failed_event(begun, api_error(error))


async def _events(response: _Response) -> AsyncGenerator[bytes, None]:
    async with aclosing(response.steps()) as steps:
        number = 0
        async for event in steps:
            numbered = event | {"sequence_number": number}
            if is_long(event):
                async for piece in event_pieces(numbered, named_begin(event)):
                    yield piece
            else:
                yield named_event(numbered)
            number += 1
