"""From a checked body to pieces of answers: what chat and text completions share."""

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from fastapi import Request, Response

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.tensors import SentTensor
from kvell.engine.requests.beam_search import BeamSearch
from kvell.errors import ChangeSomething
from kvell.front.front import Front
from kvell.server.access.visit import CLIENT_GONE_STATUS, Sequences, Visit
from kvell.server.answers.named import AnswerFormat
from kvell.server.api.bodies.completions import Heading
from kvell.server.api.http_errors import UnknownModel
from kvell.server.api.kept_likely import KeptLikely
from kvell.server.api.prompts import PromptEncoder
from kvell.server.api.schemas.beams import beam_searches
from kvell.server.api.schemas.generation import GenerationRequest
from kvell.server.api.schemas.request_body import RequestBody
from kvell.server.api.streaming import (
    ClientGone,
    EventStream,
    merged,
    primed,
    until_gone,
    with_error_event,
)
from kvell.server.logs.ignored import Ignored
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.server.text.context_length import ContextLength
from kvell.server.text.session_key import prompt_key
from kvell.server.text.several.beam_search import beam_deltas
from kvell.server.text.text_encoder import TokenIds
from kvell.server.text.text_model import PreparedPrompt, TextModel
from kvell.server.text.text_stream import TextDelta, text_deltas
from kvell.server.text.usage_so_far import UsageSoFar

Deltas = AsyncGenerator[tuple[int, TextDelta], None]
MOST_TOKENS_ASKED = 1 << 24
"""Output tokens that all answers of one request may have together."""


@dataclass(frozen=True)
class Served:
    """A model that requests may name.

    :param key: what the instance calls it: "" for its first.
    :param answers: how it writes reasoning and tool calls.
    """

    text: TextModel
    prompts: PromptEncoder
    key: str
    length: ContextLength
    answers: AnswerFormat


@dataclass(frozen=True)
class Asked:
    """A request whose body was read: prompts, and how to answer them.

    :param session: requests of one session share prefixes; "" takes each prompt's beginning.
    :param shows_special_tokens: whether special tokens are a part of the answers' text.
    :param tensors: of the images of the only prompt.
    """

    heading: Heading
    served: Served
    body: GenerationRequest
    prompts: Sequence[TokenIds]
    visit: Visit
    session: str = ""
    shows_special_tokens: bool = False
    tensors: tuple[SentTensor, ...] = ()


@dataclass(frozen=True)
class Serving:
    """A started front and the models that requests may name.

    :param models_by_name: the first for requests that name none.
    :param metrics: the observer that was given to the front.
    :param ignored_fields: names fields that nobody knows, once.
    :param ignored_hints: names kinds of ``kv_hints`` that are not followed, once.
    """

    front: Front
    models_by_name: Mapping[str, Served]
    metrics: ServerMetrics
    ignored_fields: Ignored = field(default_factory=lambda: Ignored("field_ignored", "field"))
    ignored_hints: Ignored = field(default_factory=lambda: Ignored("kv_hint_ignored", "action"))

    def note(self, body: RequestBody) -> None:
        """Tell once of each field that nobody knows; it changes nothing."""
        if unknown := body.unknown_fields():
            self.ignored_fields.note(unknown)

    def named(self, name: str | None, tenant: str = "") -> tuple[str, Served]:
        """The model of a name, and its name; None means the first.

        :param tenant: whose texts it reads.
        :raises UnknownModel: if none has it.
        """
        name = next(iter(self.models_by_name)) if name is None else name
        served = self.models_by_name.get(name)
        if served is None:
            names = ", ".join(self.models_by_name)
            raise UnknownModel(f"model={name[:200]}: is not served; use {names}")
        return name, replace(served, prompts=served.prompts.of(tenant)) if tenant else served

    def deltas(self, asked: Asked, samplings: Sequence[SamplingParams]) -> Deltas:
        """Pieces of all answers as they come, each with the index of its answer.

        :param samplings: one for each prompt, checked before the first is submitted.
        """
        body, heading, choices = asked.body, asked.heading, asked.body.choices()
        ends, has_images = asked.served.text.eos_token_ids, bool(asked.tensors)
        searches = beam_searches(body, samplings, ends, has_images=has_images)
        count = len(samplings) * body.sequences()
        most_tokens = body.sequences() * sum(one.max_tokens or 0 for one in samplings)
        if count > 1 and most_tokens > MOST_TOKENS_ASKED:
            remedy = f"ask for at most {MOST_TOKENS_ASKED} in all: set max_tokens or a smaller n"
            raise ChangeSomething("n", choices, f"asks for {most_tokens} tokens", remedy)
        if body.kv_hints is not None:
            self.ignored_hints.note(body.kv_hints.ignored())
        prompt_tokens = sum(len(ids) for ids in asked.prompts)
        trace = asked.visit.trace
        if trace is not None:
            trace.asked(heading.model, samplings[0])
        priority = body.priority or 0
        name = body.sequences_field() if body.sequences() > 1 else "prompt"
        sequences = Sequences(count, name, priority=priority)
        asked.visit.begin(heading.answer_id, heading.model, prompt_tokens, most_tokens, sequences)
        likely = KeptLikely(asked.visit, asked.served.prompts.told, body.logprobs_field())
        likely.reserve([len(ids) for ids in asked.prompts], samplings, body.sequences())
        deltas = self._answers(asked, samplings, searches)
        for _ in asked.prompts:
            self.metrics.asked(choices)
        if choices > 1:
            deltas = _prompts_counted_once(deltas, choices)
        if body.output_logprobs() is not None and not body.stream:
            deltas = likely.follow(deltas)
        return _told(deltas, choices, self.metrics, asked.visit, are_counted=bool(searches))

    def _answers(
        self, asked: Asked, samplings: Sequence[SamplingParams], searches: Sequence[BeamSearch]
    ) -> Deltas:
        """Pieces of all answers, each prompt's drawn or found by its search."""
        front, text, choices = self.front, asked.served.text, asked.body.choices()
        prompts = zip(asked.prompts, samplings, strict=True)
        if searches:
            made = asked.visit.count_tokens
            beams = [
                beam_deltas(front, text, _prepared(asked, index, ids), sampling, search, made)
                for index, ((ids, sampling), search) in enumerate(
                    zip(prompts, searches, strict=True)
                )
            ]
            return _of_all_prompts(merged(beams), choices)
        each = [(ids, one) for ids, sampling in prompts for one in sampling.choices()]
        return merged(
            [
                text_deltas(front, text, _prepared(asked, index, ids), sampling)
                for index, (ids, sampling) in enumerate(each)
            ]
        )


def _prepared(asked: Asked, index: int, ids: TokenIds) -> PreparedPrompt:
    """A prompt of the request, with the index of its answer."""
    body, visit, answer_id = asked.body, asked.visit, asked.heading.answer_id
    return PreparedPrompt(
        ids,
        f"{answer_id}-{index}",
        visit.salt(body.cache_salt),
        asked.served.key,
        body.session() or asked.session or prompt_key(ids),
        asked.shows_special_tokens,
        asked.tensors,
        body.priority or 0,
        body.deadline_seconds,
        None if visit.trace is None else visit.trace.answer(index),
        visit.tenant,
        answer_id,
    )


def heading_of(prefix: str, model: str, body: GenerationRequest) -> Heading:
    """A new answer's heading."""
    answer_id, created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
    return Heading(answer_id, model, created, bool(body.return_token_ids))


def counter(asked: Asked) -> UsageSoFar | None:
    """Usage so far, for clients that want it with every piece."""
    if not asked.body.continuous_usage():
        return None
    return UsageSoFar([len(ids) for ids in asked.prompts], asked.body.choices())


async def streamed(events: AsyncGenerator[bytes, None]) -> Response:
    """Events as a response; what goes wrong before the first is an error with a status."""
    return EventStream(with_error_event(await primed(events)))


async def guarded(request: Request, answer: Awaitable[Response]) -> Response:
    """The answer, unless the client leaves first: then it is cancelled."""
    try:
        return await until_gone(request, answer)
    except ClientGone:
        return Response(status_code=CLIENT_GONE_STATUS)


async def _prompts_counted_once(deltas: Deltas, choices: int) -> Deltas:
    """Of several answers to one prompt only the first counts the prompt's tokens."""
    async with aclosing(deltas):
        async for index, delta in deltas:
            first = index % choices == 0
            yield index, delta if first else replace(delta, usage=delta.usage.without_prompt())


async def _of_all_prompts(
    deltas: AsyncGenerator[tuple[int, tuple[int, TextDelta]], None], choices: int
) -> Deltas:
    """Pieces with the index of their answer among all, from the prompt's and theirs there."""
    async with aclosing(deltas):
        async for prompt, (choice, delta) in deltas:
            yield prompt * choices + choice, delta


async def _told(
    deltas: Deltas, choices: int, metrics: ServerMetrics, visit: Visit, *, are_counted: bool
) -> Deltas:
    """Count tokens; tell of each prompt, once its answers are there, how long the longest is.

    :param are_counted: the visit was told of the tokens as they were made.
    """
    longest: dict[int, int] = {}
    async with aclosing(deltas):
        async for index, delta in deltas:
            visit.count(replace(delta, token_ids=()) if are_counted else delta)
            prompt, tokens = index // choices, delta.usage.completion_tokens
            longest[prompt] = max(longest.get(prompt, 0), tokens)
            yield index, delta
    for tokens in longest.values():
        metrics.answered(tokens)
