"""``/v1/completions``: continuations of texts, with prompt and log probabilities if requested."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from fastapi import FastAPI, Response

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.models.text.token_offsets import TokenOffsets
from kvell.server.access.visit import RequestContext
from kvell.server.api import streaming
from kvell.server.api.bodies.completions import (
    PIECE_BYTES,
    Body,
    Lazy,
    event_pieces,
    json_response,
    usage_body,
)
from kvell.server.api.bodies.logprobs import (
    Concatenation,
    completion_logprobs,
    prompt_logprobs_body,
)
from kvell.server.api.schemas.generation import CompletionRequest
from kvell.server.api.serving import (
    BodyApi,
    Deltas,
    ParsedRequest,
    answers_body,
    counter,
    heading_of,
    text_bytes,
)
from kvell.server.api.streaming import (
    COMMENT,
    EventStream,
    error_event,
    prime,
    sse,
)
from kvell.server.text.text_stream import TextDelta, Usage, whole_answers

KIND = "text_completion"


class CompletionsApi(BodyApi):
    """The handler of text completions."""

    def install(self, app: FastAPI) -> None:
        described = dict(streaming.DESCRIBED)
        app.add_api_route(
            "/v1/completions", self.completions, methods=["POST"], responses=described
        )

    @answers_body
    async def completions(self, body: CompletionRequest, visit: RequestContext) -> Response:
        """Complete a text, or each of several.

        Every prompt has ``n`` choices with ``text``, ``logprobs`` and ``finish_reason`` (``stop``
        or ``length``); ``usage`` counts tokens, including cached ones.  A stream has pieces
        of the same form, and ends with ``data: [DONE]``.
        """
        parsed, deltas, choices = await self.answering(body, visit, keeps=not body.stream)
        if body.stream:
            events = _events(parsed, deltas, choices)
            return EventStream(await prime(events, visit.when_accepted, COMMENT, error_event))
        whole = await whole_answers(deltas, len(parsed.prompts) * body.choices())
        total = sum((answer.usage for answer in whole), Usage())
        made = Lazy(choices.choice(index, answer) for index, answer in enumerate(whole))
        return json_response(parsed.heading.body(KIND, made, usage=usage_body(total)))

    async def answering(
        self, body: CompletionRequest, visit: RequestContext, *, keeps: bool = True
    ) -> "tuple[ParsedRequest, Deltas, _Choices]":
        """Check a body and submit it; return the pieces of its answers, and their choices.

        :param keeps: whether pieces are kept until the request ends.
        :raises ChangeSomething: naming the invalid field.
        """
        name, served = self.serving.find_model(body.model, visit.tenant)
        given = body.prompts()
        form = body.form()
        suffix = body.checked_suffix()
        prompts = [
            await served.prompts.around_gap(prompt, suffix)
            if suffix
            else await served.prompts.prompt(prompt, form=form)
            for prompt in given
        ]
        parsed = ParsedRequest(heading_of("cmpl", name, body), served, body, prompts, visit)
        defaults = served.text.sampling_defaults
        room = served.length.answer_room
        samplings = [body.sampling(room(len(ids)), defaults) for ids in prompts]
        if suffix and served.text.gap_tokens is not None:
            ends = served.text.gap_tokens.end_token_ids
            samplings = [
                replace(each, stop_token_ids=(*each.stop_token_ids, *ends)) for each in samplings
            ]
        samplings = [await served.prompts.with_bad_words(sampling) for sampling in samplings]
        echoes = [
            prompt
            if isinstance(prompt, str) and not form.cuts
            else await served.prompts.decode(ids.tolist())
            for prompt, ids in zip(given, prompts, strict=True)
            if body.echo
        ]
        added_chars = [
            len(await served.prompts.decode(ids.tolist())) - len(echo)
            for ids, echo in zip(prompts, echoes, strict=False)
            if body.logprobs is not None
        ]
        visit.keep(served.prompts.answers.texts, sum(map(text_bytes, echoes)))
        deltas = self.serving.deltas(parsed, samplings, keeps=keeps)
        return parsed, deltas, _Choices(parsed, body, echoes, added_chars)


class _Choices:
    """The choices of one request's answers, whole or in pieces.

    :param echoes: text of each prompt; empty if answers do not repeat the prompts.
    :param added_chars: number of characters that encoding added before each of ``echoes``.
    """

    def __init__(
        self,
        request: ParsedRequest,
        body: CompletionRequest,
        echoes: Sequence[str],
        added_chars: Sequence[int],
    ) -> None:
        self._asked, self._body, self._echoes = request, body, echoes
        self._added_chars = added_chars
        self._chars: dict[int, int] = {}
        self._offsets: dict[int, TokenOffsets] = {}
        self._echo_chars: dict[int, int] = {}

    def choice(self, index: int, delta: TextDelta) -> Body:
        """Return the next piece of answer ``index``; its first piece has the echoed prompt."""
        is_first = index not in self._chars
        if self._body.is_prompt_alone:
            delta = replace(delta, text="", token_ids=(), logprobs=(), finish_reason="length")
        prompt = self._asked.prompts[index // self._body.choices()]
        echo = self._echoes[index // self._body.choices()] if self._echoes and is_first else ""
        logprobs = self._logprobs(index, delta, prompt.tolist() if echo else [], echo)
        self._chars[index] = self._chars.get(index, 0) + len(echo) + len(delta.text)
        more: dict[str, Any] = {}
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs:
            model = self._asked.served.text
            more["prompt_logprobs"] = prompt_logprobs_body(
                model, prompt.tolist(), delta.prompt_logprobs
            )
        return self._asked.heading.choice(index, delta, logprobs, text=echo + delta.text, **more)

    def _logprobs(self, index: int, delta: TextDelta, echoed: list[int], echo: str) -> Body | None:
        if self._body.logprobs is None:
            return None
        model = self._asked.served.text
        first = [None] if echoed else []
        prompt_logprobs = delta.prompt_logprobs if echoed else ()
        tokens = Concatenation(echoed, delta.token_ids)
        logprobs = Concatenation[TokenLogprobs | None](first, prompt_logprobs, delta.logprobs)
        added_chars = self._added_chars[index // self._body.choices()] if echoed else 0
        end = self._chars.get(index, 0) + len(echo) + len(delta.text)
        offsets = chain(
            self._echo_offsets(echoed, added_chars),
            self._answer_offsets(index, delta, len(echo), end),
        )
        return completion_logprobs(model, tokens, logprobs, offsets)

    def _echo_offsets(self, echoed: Sequence[int], added_chars: int) -> Iterator[int]:
        """Yield the offsets of the prompt's tokens in its text, without the added characters."""
        model = self._asked.served.text
        follow = model.token_offsets(skip_special_tokens=False)
        for token in echoed:
            yield max(0, follow.push(token) - max(0, added_chars))

    def _answer_offsets(
        self, index: int, delta: TextDelta, echo_chars: int, end: int
    ) -> Iterator[int]:
        if index not in self._offsets:
            skips = self._body.skip_special_tokens is not False
            prompt = self._asked.prompts[index // self._body.choices()]
            text = self._asked.served.text
            follow = text.token_offsets(skip_special_tokens=skips, after=prompt)
            self._offsets[index] = follow
            self._echo_chars[index] = echo_chars
        before = self._echo_chars[index]
        follow = self._offsets[index]
        for token in delta.token_ids:
            offset = before + follow.push(token)
            # A stop string is not in the text.
            yield offset if delta.finish_reason is None else min(offset, end)


async def _events(
    request: ParsedRequest, deltas: Deltas, choices: _Choices
) -> AsyncGenerator[bytes, None]:
    total = Usage()
    so_far = counter(request)
    async for index, delta in deltas:
        total += delta.usage
        used = None if so_far is None else so_far.after(index, delta)
        chunk = request.heading.chunk(KIND, choices.choice(index, delta), used)
        if (
            delta.logprobs
            or delta.prompt_logprobs
            or len(chunk["choices"][0]["text"]) > PIECE_BYTES
        ):
            async for piece in event_pieces(chunk):
                yield piece
        else:
            yield sse(chunk)
    if request.body.include_usage():
        yield sse(request.heading.body(KIND, [], usage=usage_body(total)))
    yield streaming.DONE
