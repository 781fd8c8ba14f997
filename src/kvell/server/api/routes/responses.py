"""``/v1/responses``: OpenAI's newer form of chat; nothing is stored."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Response
from typing_extensions import override

from kvell.server.access.visit import RequestContext
from kvell.server.api import streaming
from kvell.server.api.bodies.completions import Body
from kvell.server.api.bodies.response_items import (
    Event,
    OutputWriter,
    response_body,
    response_usage,
)
from kvell.server.api.http_errors import ApiError
from kvell.server.api.routes.chat import ChatApi, ChatStream
from kvell.server.api.routes.dialects import DialectAnswer
from kvell.server.api.schemas.responses import ResponsesRequest
from kvell.server.api.serving import BodyApi, answers_body
from kvell.server.logs.lines import OncePerName
from kvell.server.text.text_stream import TextDelta


@dataclass(frozen=True)
class ResponsesApi(BodyApi):
    """The handler of responses.

    :param ignored_tools: logs each type of tool that is left out once.
    :param ignored_items: logs each type of item that is left out once.
    """

    ignored_tools: OncePerName = field(default_factory=lambda: OncePerName("tool_left_out", "type"))
    ignored_items: OncePerName = field(default_factory=lambda: OncePerName("item_left_out", "type"))

    def install(self, app: FastAPI) -> None:
        described = dict(streaming.DESCRIBED)
        app.add_api_route("/v1/responses", self.respond, methods=["POST"], responses=described)

    @answers_body
    async def respond(self, body: ResponsesRequest, visit: RequestContext) -> Response:
        """Answer a conversation, in OpenAI's newer format.

        ``output`` has the reasoning, the message and the calls of the answer as items.  A stream
        has OpenAI's named events, from ``response.created`` to ``response.completed``.  Nothing
        is stored, so every request has the whole conversation.
        """
        self.ignored_tools.note(body.left_out_tools())
        self.ignored_items.note(body.left_out_items())
        answering = await ChatApi(self.serving).answering(body.chat(), visit, "resp")
        defaults = answering.asked.served.text.sampling_defaults
        response = _Response(body.with_defaults(defaults), answering)
        return await response.response(streams=bool(body.stream))


class _Response(DialectAnswer):
    def __init__(self, request: ResponsesRequest, answering: ChatStream) -> None:
        super().__init__(answering.deltas, answering.asked.visit)
        self._asked = request
        self._answering = answering
        self._reader = answering.reader(0)
        heading = answering.asked.heading
        self._writer = OutputWriter(
            heading.answer_id, self._reader.call_ids, answering.asked.served.text
        )

    @override
    def begin(self) -> Sequence[Event]:
        begun = self._body("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [{"type": kind, "response": begun} for kind in kinds]

    @override
    def read(self, delta: TextDelta) -> Sequence[Event]:
        logprobs = delta.logprobs if self._asked.tells_logprobs() else ()
        return self._writer.write(self._reader.read(delta), delta.token_ids, logprobs)

    @override
    async def end(self) -> tuple[Sequence[Event], Body]:
        is_cut = self.last is not None and self.last.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        events = self._writer.close(status)
        usage = response_usage(self.usage, await self._answering.reasoning_tokens())
        details = {"reason": "max_output_tokens"} if is_cut else None
        items = self._writer.items
        body = self._body(status, output=items, usage=usage, incomplete_details=details)
        return [*events, {"type": f"response.{status}", "response": body}], body

    @override
    def fail(self, error: ApiError) -> Event:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failure = {"code": code, "message": error.message}
        return {"type": "response.failed", "response": self._body("failed", error=failure)}

    @override
    async def events(self) -> AsyncGenerator[Event, None]:
        number = 0
        async with aclosing(super().events()) as events:
            async for event in events:
                yield event | {"sequence_number": number}
                number += 1

    def _body(self, status: str, **more: Any) -> Body:
        heading, tools = self._answering.asked.heading, self._answering.tools
        return response_body(heading, self._asked, tools, status, **more)
