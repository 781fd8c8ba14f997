"""``/v1/messages``: Anthropic's API."""

from collections.abc import Sequence

from fastapi import FastAPI, Response
from typing_extensions import override

from kvell.server.access.visit import RequestContext
from kvell.server.answers.deltas import merge
from kvell.server.api import streaming
from kvell.server.api.bodies.completions import Body, Heading, json_response
from kvell.server.api.bodies.message_blocks import BlockWriter
from kvell.server.api.http_errors import (
    ANTHROPIC,
    ANTHROPIC_DESCRIBED,
    ApiError,
)
from kvell.server.api.routes.chat import ChatApi, ChatStream
from kvell.server.api.routes.dialects import DialectAnswer
from kvell.server.api.schemas.messages.requests import CountTokensRequest, MessagesRequest
from kvell.server.api.serving import BodyApi, answers_body
from kvell.server.text.text_stream import TextDelta, Usage


def message_answer(heading: Heading, blocks: Sequence[Body], ended: Body, usage: Body) -> Body:
    """Return a message with the answer so far.

    :param ended: from :func:`how_ended`.
    """
    head = {"id": heading.answer_id, "type": "message", "role": "assistant"}
    return {**head, "model": heading.model, "content": list(blocks), **ended, "usage": usage}


def how_ended(delta: TextDelta | None, *, calls: bool) -> Body:
    """Return the stop reason and the stop sequence of an answer.

    :param delta: last piece of the answer; None if no piece has arrived.
    :param calls: whether the answer calls tools.
    """
    reason = sequence = None
    if delta is not None and delta.finish_reason is not None:
        sequence = delta.stop_reason
        if delta.finish_reason == "length":
            reason = "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def message_usage(usage: Usage, thinking_tokens: int) -> Body:
    """Return ``usage``: prompt tokens read from the cache, written to the cache, and others."""
    details = {"thinking_tokens": min(thinking_tokens, usage.completion_tokens)}
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": details,
        "service_tier": "standard",
    }


class MessagesApi(BodyApi):
    """The handlers of ``/v1/messages``."""

    def install(self, app: FastAPI) -> None:
        errors = dict(ANTHROPIC_DESCRIBED)
        described = {**streaming.DESCRIBED, **errors}
        app.add_api_route(ANTHROPIC, self.answer, methods=["POST"], responses=described)
        count = f"{ANTHROPIC}/count_tokens"
        app.add_api_route(count, self.count_tokens, methods=["POST"], responses=errors)

    @answers_body
    async def answer(self, body: MessagesRequest, visit: RequestContext) -> Response:
        """Answer a conversation, as Anthropic's API does.

        ``content`` has the thinking, the text and the calls of the answer as blocks;
        ``stop_reason`` is ``end_turn``, ``max_tokens``, ``tool_use`` or ``stop_sequence``.  A
        stream has Anthropic's named events, from ``message_start`` to ``message_stop``.  Errors
        are ``{"type": "error", "error": {"type": …, "message": …}}``.
        """
        answering = await ChatApi(self.serving).answering(body.chat(), visit, "msg")
        return await _Message(body, answering).response(streams=bool(body.stream))

    @answers_body
    async def count_tokens(self, body: CountTokensRequest, visit: RequestContext) -> Response:
        """Count the tokens of a conversation's prompt, as ``input_tokens``.

        The conversation may be too long to be served.
        """
        tokens = await ChatApi(self.serving).prompt_tokens(body.chat(), visit)
        return json_response({"input_tokens": tokens})


class _Message(DialectAnswer):
    def __init__(self, request: MessagesRequest, answering: ChatStream) -> None:
        super().__init__(answering.deltas, answering.asked.visit)
        self._answering = answering
        self._reader = answering.reader(0)
        self._writer = BlockWriter(self._reader.call_ids, omits_thinking=request.omits_thinking())

    @override
    def begin(self) -> Sequence[Body]:
        """Return the first event, without cached tokens: their number is known only at the end."""
        request = self._answering.asked
        usage = message_usage(Usage(sum(map(len, request.prompts))), 0)
        ended = how_ended(None, calls=False)
        message = message_answer(request.heading, (), ended, usage)
        return [{"type": "message_start", "message": message}]

    @override
    def read(self, delta: TextDelta) -> Sequence[Body]:
        parts = merge(self._reader.read(delta))
        return [event for part in parts for event in self._writer.part_events(part)]

    @override
    async def end(self) -> tuple[Sequence[Body], Body]:
        closed = self._writer.close()
        ended = how_ended(self.last, calls=bool(self._reader.call_ids))
        usage = message_usage(self.usage, await self._answering.reasoning_tokens())
        body = message_answer(self._answering.asked.heading, self._writer.blocks, ended, usage)
        last = {"type": "message_delta", "delta": ended, "usage": usage}
        return [*closed, last, {"type": "message_stop"}], body

    @override
    def fail(self, error: ApiError) -> Body:
        return dict(error.anthropic_body())
