"""``/v1/chat/completions``: answers with reasoning, tool calls and probabilities."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from fastapi import FastAPI, Response

from kvell.engine.protocol.request_spec import SentTensor
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.schemas.references import Schema
from kvell.engine.protocol.structured_outputs import Calls, ReasoningBudget
from kvell.engine.protocol.structured_outputs import Reasoning as Reasoned
from kvell.errors import ChangeSomething
from kvell.front.routes import conversation_key
from kvell.server.access.visit import RequestContext
from kvell.server.answers.deltas import (
    AnswerDelta,
    Content,
    ParsedAnswer,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    merge,
    parse,
)
from kvell.server.answers.forced import (
    NamedFunction,
    ToolChoice,
    Tools,
    callable_tools,
    chat_tools,
    forced_schema,
    forced_tool_calls,
    schema_field,
    strict_parts,
    tool_choice,
)
from kvell.server.answers.named import AnswerFormat
from kvell.server.answers.reading.modes import ModeParser
from kvell.server.api import streaming
from kvell.server.api.bodies.completions import (
    PIECE_BYTES,
    Body,
    Heading,
    event_pieces,
    json_response,
    usage_body,
)
from kvell.server.api.bodies.logprobs import chat_logprobs, prompt_logprobs_body
from kvell.server.api.prompts import image_urls
from kvell.server.api.schemas.chat import ChatRequest
from kvell.server.api.schemas.formats import json_constraint
from kvell.server.api.serving import (
    BodyApi,
    Deltas,
    ParsedRequest,
    ServerModel,
    answers_body,
    counter,
    heading_of,
)
from kvell.server.api.streaming import (
    COMMENT,
    EventStream,
    error_event,
    prime,
    sse,
)
from kvell.server.text.text_encoder import CHAT_FORM, TokenIds
from kvell.server.text.text_model import TextModel
from kvell.server.text.text_stream import NO_USAGE, TextDelta, Usage, whole_answers

CHUNK = "chat.completion.chunk"


def chat_body(
    heading: Heading, choices: Sequence[Body], total: Usage, reasoning_tokens: int
) -> Body:
    """Return a whole chat completion; the log probabilities of its prompt are also where vLLM's
    answers have them."""
    scores = choices[0].get("prompt_logprobs") if choices else None
    more = {} if scores is None else {"prompt_logprobs": scores}
    usage = usage_body(total, reasoning_tokens)
    return heading.body("chat.completion", choices, usage=usage, **more)


def message_body(answer: ParsedAnswer, call_ids: Sequence[str]) -> Body:
    """Return the message of a choice; its content is null if the answer only calls functions."""
    content = None if answer.calls and not answer.content else answer.content
    message: Body = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call_id, call in zip(call_ids, answer.calls, strict=True)
        ]
    return message


def part_body(part: AnswerDelta, call_ids: Sequence[str]) -> Body:
    """Return the ``delta`` of a piece with one part of the answer."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallBegin(index, name):
            function: dict[str, Any] = {"name": name, "arguments": ""}
            call = {"id": call_ids[index], "type": "function", "function": function}
            return {"tool_calls": [{"index": index, **call}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class ReasoningCount:
    """The number of tokens between two tags, without the tags.

    :param end: the token that ends the reasoning.
    :param start: the token that begins it; None if the answer begins inside the reasoning.
    :param calls: tokens that begin a call, which ends reasoning that is not ended behind it.
    """

    def __init__(self, end: int, start: int | None, calls: Collection[int] = ()) -> None:
        self._end, self._start, self._calls = end, start, calls
        self._before_call: int | None = None
        self._has_ended = False
        self._tokens = 0

    @property
    def tokens(self) -> int:
        if self._has_ended or self._before_call is None:
            return self._tokens
        return self._before_call

    def push(self, token_ids: Iterable[int]) -> None:
        """Count the reasoning tokens among the answer's next tokens."""
        if self._has_ended:
            return
        for token in token_ids:
            if token == self._start:
                self._start = None
            elif self._start is None and token == self._end:
                self._has_ended = True
                return
            elif self._start is None:
                if self._before_call is None and token in self._calls:
                    self._before_call = self._tokens
                self._tokens += 1


FIELD = "thinking_token_budget"
UNBOUND = -1


class TagTokens(NamedTuple):
    """The tokens of the tags of reasoning.

    :param end: ends it.
    :param start: begins it; None if the answer begins inside it.
    :param calls: begin a call, which ends it too.
    """

    end: int
    start: int | None
    calls: tuple[int, ...] = ()


def tag_tokens(
    model: TextModel, answers: AnswerFormat, reasoning: Reasoned | None, *, may_call: bool
) -> TagTokens | None:
    """Return the tokens of the reasoning tags; None if there are no tags, or one is several tokens.

    :param reasoning: None if no reasoning can precede the content.
    :param may_call: whether a call may end the reasoning.
    """
    if reasoning is None or not answers.has_thinking_tags:
        return None
    tags = (reasoning.ends[0], reasoning.start)
    ids = [model.encode(tag, add_special_tokens=False).tolist() for tag in tags if tag]
    if any(len(tag_ids) != 1 for tag_ids in ids):
        return None
    starts = answers.call_starts() if may_call else ()
    calls = [model.encode(start, add_special_tokens=False).tolist() for start in starts]
    single = tuple(each[0] for each in calls if len(each) == 1)
    return TagTokens(ids[0][0], ids[1][0] if len(ids) > 1 else None, single)


def reasoning_budget(
    tokens: int | None, answers: AnswerFormat, reasoning: Reasoned | None, tags: TagTokens | None
) -> ReasoningBudget | None:
    """Return the limit of an answer's reasoning; None if there is no limit.

    :param tokens: the requested limit; None and -1 mean no limit.
    :param reasoning: None if no reasoning can precede the content.
    :param tags: from :func:`tag_tokens`.
    :raises ChangeSomething: if the model has no reasoning tags, or a tag is several tokens.
    """
    if tokens is None or tokens == UNBOUND:
        return None
    if not answers.has_thinking_tags:
        problem = "needs a model that marks its reasoning with tags, which this one does not"
        raise ChangeSomething(FIELD, tokens, problem, "leave it out")
    if reasoning is None:  # the template has already ended it
        return None
    if tags is None:
        problem = "needs a tokenizer in which each tag of reasoning is one token"
        raise ChangeSomething(FIELD, tokens, problem, "leave it out")
    return ReasoningBudget(tokens, *tags)


MESSAGES_A_TURN = 512
"""The messages that are converted in one turn of the event loop."""
PROMPT_END_TOKENS = 64
"""Tokens at the end of a prompt that show whether the template has opened the reasoning."""


class ChatApi(BodyApi):
    """The handler of chat completions."""

    def install(self, app: FastAPI) -> None:
        """Add the route."""
        described = dict(streaming.DESCRIBED)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], responses=described)

    @answers_body
    async def chat(self, body: ChatRequest, visit: RequestContext) -> Response:
        """Answer a conversation.

        There are ``n`` choices with a ``message`` (``content``, ``reasoning_content``,
        ``tool_calls``), ``logprobs`` and ``finish_reason`` (``stop``, ``length`` or
        ``tool_calls``); ``usage`` counts tokens, including cached ones.  A stream has pieces
        with a ``delta`` instead of a message, and ends with ``data: [DONE]``.
        """
        answering = await self.answering(body, visit, keeps=not body.stream)
        request = answering.asked
        if body.stream:
            events = _events(answering)
            return EventStream(await prime(events, visit.when_accepted, COMMENT, error_event))
        answers = await whole_answers(answering.deltas, body.choices())
        total = sum((answer.usage for answer in answers), Usage())
        choices = []
        for index, answer in enumerate(answers):
            choices.append(answering.whole(index, answer))
            await asyncio.sleep(0)  # let other tasks run
        tokens = await answering.reasoning_tokens()
        return json_response(chat_body(request.heading, choices, total, tokens))

    async def prompt_tokens(self, body: ChatRequest, visit: RequestContext) -> int:
        """Return the number of tokens of a body's prompt, even if it is too long to be served.

        :raises ChangeSomething: naming the invalid field.
        """
        _, served = self.serving.find_model(body.model, visit.tenant)
        tools = chat_tools(body.tools)
        offered = callable_tools(tool_choice(body.tool_choice, tools), tools)
        prompt, _ = await _prompt(served, body, offered, fits=False)
        return len(prompt)

    async def answering(
        self,
        body: ChatRequest,
        visit: RequestContext,
        prefix: str = "chatcmpl",
        *,
        keeps: bool = True,
    ) -> "ChatStream":
        """Check a body and submit it.

        :param keeps: whether pieces of the answers are kept until the request ends.
        :raises ChangeSomething: naming the invalid field.
        """
        name, served = self.serving.find_model(body.model, visit.tenant)
        tools: list[Schema] = []
        offered: list[Schema] = []
        choice: ToolChoice = "none"
        forced: Schema | None = None
        parallel = body.parallel_tool_calls is not False
        if body.tools or body.tool_choice is not None:
            tools = chat_tools(body.tools)
            choice = tool_choice(body.tool_choice, tools)
            forced = forced_schema(choice, tools, parallel=parallel)
            offered = callable_tools(choice, tools)
        prompt, tensors = await _prompt(served, body, offered)
        end = ""
        if served.answers.has_thinking_tags:  # the template may open or close the reasoning
            end = await served.prompts.decode(prompt[-PROMPT_END_TOKENS:].tolist())
            if body.continues_last():
                end = served.answers.reasoning_context(end, *body.messages[-1].texts())
        room = served.length.answer_room(len(prompt))
        sampling = body.sampling(room, served.text.sampling_defaults)
        if sampling.bad_words:
            sampling = await served.prompts.with_bad_words(sampling)
        if forced is not None:
            sampling = _forced(sampling, forced, choice, tools)
        elif offered:
            calls = partial(served.answers.calls_instead, offered, parallel=parallel)
            sampling = _or_calls(sampling, calls)
        reasoning = None if served.answers.is_plain else served.answers.reasoning_behind(end)
        tags: TagTokens | None = None
        if reasoning is not None:
            sampling = _bound_behind(sampling, reasoning)
            may_call = bool(offered) and forced is None
            tags = tag_tokens(served.text, served.answers, reasoning, may_call=may_call)
        if body.thinking_token_budget is not None:
            budget = reasoning_budget(body.thinking_token_budget, served.answers, reasoning, tags)
            sampling = replace(sampling, reasoning_budget=budget)
        request = ParsedRequest(
            heading_of(prefix, name, body),
            served,
            body,
            [prompt],
            visit,
            conversation_key(message.model_dump() for message in body.messages),
            served.answers.shows_special_tokens,
            tensors,
        )
        deltas = self.serving.deltas(request, [sampling], keeps=keeps)
        return ChatStream(request, body, deltas, offered, choice, end, tags)


@dataclass
class ChatStream:
    """A submitted chat request, with the readers of its answers.

    :param prompt_end: text of the end of the prompt.
    :param tags: tokens that end and begin the reasoning; None if there are none.
    :ivar readers: the readers of answers that have begun, by index.
    """

    asked: ParsedRequest
    body: ChatRequest
    deltas: Deltas
    tools: list[dict[str, Any]]
    choice: ToolChoice
    prompt_end: str
    tags: TagTokens | None = None
    readers: dict[int, "Reader"] = field(default_factory=dict)

    def reader(self, index: int) -> "Reader":
        """Return the reader of answer ``index``."""
        if index not in self.readers:
            answers = self.asked.served.answers
            parser: ModeParser | None = None
            if self.tools or not answers.is_plain:
                forced = forced_tool_calls(self.choice)
                parser = answers.parser(self.tools, prompt=self.prompt_end, forced=forced)
            count = None if self.tags is None else ReasoningCount(*self.tags)
            tells = self.body.include_reasoning
            self.readers[index] = Reader(parser, count, tells_reasoning=tells)
        return self.readers[index]

    async def reasoning_tokens(self) -> int:
        """Return the number of reasoning tokens read so far, in all answers.

        If no single tokens begin and end the reasoning, count the tokens of its text.
        """
        prompts = self.asked.served.prompts
        tokens = 0
        for reader in self.readers.values():
            if reader.reasoning and reader.count is not None:
                tokens += reader.count.tokens
            elif reader.reasoning:
                tokens += await prompts.count_answer_tokens("".join(reader.reasoning))
        return tokens

    def whole(self, index: int, answer: TextDelta) -> Body:
        reader = self.reader(index)
        message = message_body(parse(reader.read(answer)), reader.call_ids)
        return self._choice(index, answer, reader, message=message)

    def pieces(self, index: int, delta: TextDelta) -> list[Body]:
        """Return the choices of the stream's next pieces; the last one has the finish reason.

        The first one has the log probabilities.
        """
        reader = self.readers.get(index) or self.reader(index)
        parts = reader.read(delta)
        if len(parts) > 1:
            parts = merge(parts)
        bodies = [part_body(part, reader.call_ids) for part in parts] or [{}]
        if len(bodies) == 1:  # nearly always
            return [self._choice(index, delta, reader, delta=bodies[0])]
        bare = replace(delta, token_ids=(), logprobs=(), prompt_logprobs=())
        last = len(bodies) - 1
        return [
            self._choice(
                index,
                replace(
                    delta if place == 0 else bare,
                    finish_reason=delta.finish_reason if place == last else None,
                    stop_reason=delta.stop_reason if place == last else None,
                ),
                reader,
                delta=body,
            )
            for place, body in enumerate(bodies)
        ]

    def _choice(self, index: int, delta: TextDelta, reader: "Reader", /, **content: Any) -> Body:
        model = self.asked.served.text
        logprobs = None
        is_scored = self.body.logprobs or self.body.top_logprobs
        if is_scored and (delta.token_ids or "message" in content):
            logprobs = chat_logprobs(model, delta.token_ids, delta.logprobs)
        if self.body.prompt_logprobs is not None and delta.prompt_logprobs:
            prompt = self.asked.prompts[0].tolist()
            content["prompt_logprobs"] = prompt_logprobs_body(model, prompt, delta.prompt_logprobs)
        choice = self.asked.heading.choice(index, delta, logprobs, **content)
        calls = bool(reader.call_ids) and not isinstance(self.choice, NamedFunction)
        if delta.finish_reason == "stop" and calls:
            choice["finish_reason"] = "tool_calls"
        return choice


class Reader:
    """A reader that splits one answer's text into parts, and gives every call an id.

    :param parser: None if all text is content.
    :param count: counts the reasoning tokens; None if no single tokens mark the reasoning.
    :param tells_reasoning: whether the parts include the reasoning.
    :ivar reasoning: texts of the reasoning; with ``count`` only the first ones.
    """

    def __init__(
        self,
        parser: ModeParser | None,
        count: ReasoningCount | None = None,
        *,
        tells_reasoning: bool = True,
    ) -> None:
        self._parser, self.count, self._tells_reasoning = parser, count, tells_reasoning
        self.call_ids: list[str] = []
        self.reasoning: list[str] = []

    def read(self, delta: TextDelta) -> list[AnswerDelta]:
        """Return the parts of a piece of text; the last piece includes text that was held back."""
        if self._parser is None:
            return [Content(delta.text)] if delta.text else []
        parts = self._parser.push(delta.text)
        if self.count is not None:
            self.count.push(delta.token_ids)
        if delta.finish_reason is not None:
            parts = [*parts, *self._parser.finish()]
        thoughts = [part.text for part in parts if isinstance(part, Reasoning)]
        if self.count is None or not self.reasoning:
            self.reasoning += thoughts
        new = sum(isinstance(part, ToolCallBegin) for part in parts)
        self.call_ids += [f"call_{uuid.uuid4().hex[:24]}" for _ in range(new)]
        if not self._tells_reasoning:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        return [part for part in parts if not isinstance(part, Content) or part.text]


async def _prompt(
    served: ServerModel, body: ChatRequest, tools: list[dict[str, Any]], *, fits: bool = True
) -> tuple[TokenIds, tuple[SentTensor, ...]]:
    """Return the prompt's token ids, and the tensors of its images.

    :param fits: whether the prompt must leave room for an answer; a prompt with images always must.
    """
    has_parts = any(isinstance(message.content, list) for message in body.messages)
    images = image_urls(body.messages, taken=served.text.takes_images) if has_parts else []
    plain = []
    for message in body.messages:
        plain.append(message.plain())
        if not len(plain) % MESSAGES_A_TURN:
            await asyncio.sleep(0)  # other requests have a turn
    fields = body.template_fields()
    opens = body.add_generation_prompt is not False
    continues = bool(body.continue_final_message) and body.continues_last()
    if not images:
        ending = {"opens_answer": opens, "continues_last": continues}
        is_cut = body.truncate_prompt_tokens is not None
        form = body.form() if is_cut or body.add_special_tokens else CHAT_FORM
        return await served.prompts.chat(plain, tools, fields, **ending, form=form, fits=fits), ()
    _refuse_beside_images(body)
    encode = served.prompts.encode_with_images
    return await encode(plain, images, tools, fields, opens_answer=opens)


def _refuse_beside_images(body: ChatRequest) -> None:
    """Refuse fields that are not supported with images.

    :raises ChangeSomething: naming the field.
    """
    for name in ("continue_final_message", "add_special_tokens", "truncate_prompt_tokens"):
        if getattr(body, name):
            problem = "is not supported with images"
            raise ChangeSomething(name, getattr(body, name), problem, "leave it out")


def _forced(
    sampling: SamplingParams, schema: Schema, choice: ToolChoice, tools: Tools
) -> SamplingParams:
    """Return sampling parameters with the schema of forced calls, instead of a response format.

    :raises ChangeSomething: if the text has another constraint.
    """
    constraint = sampling.structured_outputs
    if constraint is not None and not constraint.named.startswith("response_format"):
        problem = "cannot be combined with calls that are forced"
        raise ChangeSomething(
            constraint.field_name, "…", problem, "use tool_choice auto, or leave it out"
        )
    forced = json_constraint(schema, schema_field(choice, tools), strict_parts(choice, tools))
    return replace(sampling, structured_outputs=forced)


def _or_calls(sampling: SamplingParams, calls: Callable[[], Calls | None]) -> SamplingParams:
    """Return sampling parameters that allow calls instead of an answer in a response format.

    :param calls: returns the calls; not called without a response format.
    """
    constraint = sampling.structured_outputs
    if constraint is None or not constraint.named.startswith("response_format"):
        return sampling
    return replace(sampling, structured_outputs=replace(constraint, calls=calls()))


def _bound_behind(sampling: SamplingParams, reasoning: Reasoned) -> SamplingParams:
    constraint = sampling.structured_outputs
    if constraint is None:
        return sampling
    return replace(sampling, structured_outputs=replace(constraint, reasoning=reasoning))


async def _events(answering: ChatStream) -> AsyncGenerator[bytes, None]:
    request = answering.asked
    tells_usage = request.body.include_usage()
    total = Usage()
    so_far = counter(request) if tells_usage else None
    async with aclosing(answering.deltas) as deltas:
        async for index, delta in deltas:
            begin = b""
            if index not in answering.readers:
                begun = {"role": "assistant", "content": ""}
                opening = request.heading.choice(index, TextDelta(""), delta=begun)
                begin = sse(request.heading.body(CHUNK, [opening]))
            if tells_usage and delta.usage is not NO_USAGE:
                total += delta.usage
            used = None if so_far is None else so_far.after(index, delta)
            for choice in answering.pieces(index, delta):
                chunk = request.heading.chunk(CHUNK, choice, used)
                if delta.logprobs or delta.prompt_logprobs or len(delta.text) > PIECE_BYTES:
                    async for piece in event_pieces(chunk, begin + b"data: "):
                        yield piece
                else:
                    yield begin + sse(chunk)
                begin = b""
    if tells_usage:
        usage = usage_body(total, await answering.reasoning_tokens())
        yield sse(request.heading.body(CHUNK, [], usage=usage))
    yield streaming.DONE
