"""Generation of answers to a validated body, shared by chat and text completions."""

import asyncio
import inspect
import re
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TypeVar

from fastapi import Request, Response

from kvell.engine.protocol.logprobs import count_numbers
from kvell.engine.protocol.request_spec import RequestSpec, SentTensor, to_token_bytes, to_token_ids
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.beam_search import BeamSearch
from kvell.errors import ChangeSomething
from kvell.front.front import Front
from kvell.front.request_log import RequestTrace
from kvell.front.routes import prompt_key
from kvell.server.access.visit import CLIENT_GONE_STATUS, RequestContext, Sequences
from kvell.server.answers.named import AnswerFormat
from kvell.server.api.bodies.completions import Heading
from kvell.server.api.door.access_guard import visit_of
from kvell.server.api.http_errors import MODELS, UnknownModel, named_as_sent
from kvell.server.api.prompts import PromptEncoder
from kvell.server.api.schemas.generation import GenerationRequest, beam_searches
from kvell.server.api.schemas.request_body import RequestBody
from kvell.server.api.streaming import cancel_all, merge
from kvell.server.logs.lines import OncePerName
from kvell.server.metrics.front_metrics import ServerMetrics
from kvell.server.text.several.beam_search import beam_deltas
from kvell.server.text.text_bounds import TOLD_BYTES, AnswerMemory, ContextLength
from kvell.server.text.text_encoder import TokenIds
from kvell.server.text.text_model import TextModel
from kvell.server.text.text_stream import TextDelta, Usage, UsageSoFar, text_deltas
from kvell.vocabulary import RequestId

LATEST = ":latest"
"""The tag that Ollama's clients add to a model's name."""
LONGEST_NAME = 200
_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)([kmbt])", re.IGNORECASE)
_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
NOMINAL_PERCENT = 20
"""How far a model's numbers may be from the size in its name: Qwen2.5-7B has 7.6 billion."""


def served_name(name: str, names: Collection[str], parameters: Callable[[str], int]) -> str:
    """Return the name under which a model is served.

    :param name: one of ``names``, alone or with the tag ``latest`` or that of its size.
    :param parameters: returns the numbers in the weights of the model of a name; 0 if unknown.
    :raises UnknownModel: if no model has the name, or its model has another size.
    """
    if name in names:
        return name
    bare, mark, tag = name.rpartition(":")
    shown = name[:LONGEST_NAME]
    if mark and bare in names:
        count = parameters(bare)
        if mark + tag == LATEST or is_size(tag, count):
            return bare
        is_another = count and _SIZE.fullmatch(tag)
        why = f"has {human_number(count)} parameters" if is_another else "has no such tag"
        raise UnknownModel(f"model={shown}: is not served: {bare} {why}; use {bare}")
    raise UnknownModel(f"model={shown}: is not served; use {', '.join(names)} (see {MODELS})")


def is_size(tag: str, parameters: int) -> bool:
    """Return whether a tag such as ``135m`` is the nominal size of a model.

    :param parameters: numbers in its weights; 0 if unknown.
    """
    match = _SIZE.fullmatch(tag)
    if match is None:
        return False
    nominal = float(match[1]) * _UNITS[match[2].lower()]
    return 100 * abs(parameters - nominal) <= NOMINAL_PERCENT * nominal


def human_number(number: int) -> str:
    """Return a number of parameters as Ollama writes it: ``134.52M``."""
    for unit, size, form in (("B", 10**9, ".1f"), ("M", 10**6, ".2f")):
        if number >= size:
            return f"{number / size:{'.0f' if number % size == 0 else form}}{unit}"
    return f"{number / 1000:.0f}K" if number >= 1000 else str(number)


EXPECTED_TOKENS = 512
"""Tokens of an answer to reserve memory for: at first, and in each later step."""
BYTES_PER_NUMBER = 16
"""Bytes of a token and its probability in :class:`.KeptLogprobs`, with room to grow."""
MOST_NUMBERS = TOLD_BYTES // BYTES_PER_NUMBER
"""Log probabilities that one request may ask for."""
TOKEN_BYTES = 64
"""Bytes of a token of an answer, without its text's characters."""
STEP_BYTES = 1 << 14
"""Bytes to reserve at a time for tokens and texts."""


def text_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


class KeptAnswer:
    """The memory that the answers to one request reserve, until its visit ends.

    It is the :class:`.OutputRoom` of the request: output is counted before it is kept.

    :param field: request field that asks for log probabilities, for errors.
    :param frees: whether output is forgotten once it is sent, as in a stream.
    """

    def __init__(
        self, visit: RequestContext, memory: AnswerMemory, field: str, *, frees: bool
    ) -> None:
        self._visit, self._memory, self._field, self._frees = visit, memory, field, frees
        self._held_numbers = self._reserved_numbers = 0
        self._held_bytes = self._reserved_bytes = 0
        self._step_numbers = EXPECTED_TOKENS

    def reserve(
        self, prompt_tokens: Sequence[int], samplings: Sequence[SamplingParams], sequences: int
    ) -> None:
        """Reserve memory for the log probabilities that a request asks for.

        :param prompt_tokens: number of tokens of each prompt, in the order of ``samplings``.
        :param sequences: number of answers to each prompt.
        :raises ChangeSomething: if the request asks for more than :data:`MOST_NUMBERS`.
        :raises TryLater: if the pool has no room now.
        """
        of_prompts = of_answers = 0
        for tokens, sampling in zip(prompt_tokens, samplings, strict=True):
            if sampling.prompt_logprobs is not None:
                of_prompts += tokens * (1 + sampling.prompt_logprobs)
            if sampling.logprobs is not None:
                expected = min(sampling.max_tokens or EXPECTED_TOKENS, EXPECTED_TOKENS)
                of_answers += sequences * expected * (1 + sampling.logprobs)
                self._step_numbers = EXPECTED_TOKENS * (1 + sampling.logprobs)
        numbers = of_prompts + of_answers
        if numbers > MOST_NUMBERS:
            remedy = f"ask for at most {MOST_NUMBERS}: fewer answers, tokens or alternatives"
            raise ChangeSomething(
                self._field,
                f"{numbers} log probabilities",
                "are too many",
                remedy,
                bound="logprob_bytes",
            )
        if numbers:
            self._visit.keep(self._memory.logprobs, numbers * BYTES_PER_NUMBER)
            self._reserved_numbers = of_answers

    def grow(self, tokens: int, numbers: int) -> None:
        """Count output.

        :raises TryLater: if there is no room for it.
        """
        self._held_bytes += tokens * TOKEN_BYTES
        if self._held_bytes > self._reserved_bytes:
            self._reserve_bytes()
        if not numbers:
            return
        while self._held_numbers + numbers > self._reserved_numbers:
            self._visit.keep(self._memory.logprobs, self._step_numbers * BYTES_PER_NUMBER)
            self._reserved_numbers += self._step_numbers
        self._held_numbers += numbers

    def add_text(self, text: str) -> None:
        """Count a text.

        :raises TryLater: if there is no room for it.
        """
        self._held_bytes += text_bytes(text)
        if self._held_bytes > self._reserved_bytes:
            self._reserve_bytes()

    def on_sent(self, delta: TextDelta) -> None:
        """Note that a piece was sent."""
        if self._frees:
            self._held_bytes -= len(delta.token_ids) * TOKEN_BYTES + text_bytes(delta.text)
            if delta.logprobs:
                self._held_numbers -= count_numbers(delta.logprobs)

    def _reserve_bytes(self) -> None:
        """Reserve what is held, in steps; a request that is refused keeps nothing."""
        steps = -(-(self._held_bytes - self._reserved_bytes) // STEP_BYTES)
        self._visit.keep(self._memory.texts, steps * STEP_BYTES)
        self._reserved_bytes += steps * STEP_BYTES


Deltas = AsyncGenerator[tuple[int, TextDelta], None]
MOST_TOKENS_ASKED = 1 << 24
"""Maximum output tokens of all answers to one request together."""


@dataclass(frozen=True)
class ServerModel:
    """A model that requests may name.

    :param key: the instance's name for the model; "" for the instance's first model.
    :param answers: format of the model's reasoning and tool calls.
    """

    text: TextModel
    prompts: PromptEncoder
    key: str
    length: ContextLength
    answers: AnswerFormat


@dataclass(frozen=True)
class ParsedRequest:
    """A request with a validated body and encoded prompts.

    :param session: requests of one session share prefixes; "" uses each prompt's beginning.
    :param shows_special_tokens: whether the answers' text contains special tokens.
    :param tensors: tensors of the images; a request with images has one prompt.
    """

    heading: Heading
    served: ServerModel
    body: GenerationRequest
    prompts: Sequence[TokenIds]
    visit: RequestContext
    session: str = ""
    shows_special_tokens: bool = False
    tensors: tuple[SentTensor, ...] = ()

    def spec(self, index: int, prompt: bytes, sampling: SamplingParams) -> RequestSpec:
        """Return what answer number ``index`` asks of an instance.

        :param prompt: token ids as little-endian int32 bytes.
        """
        body = self.body
        visit = self.visit
        answer_id = self.heading.answer_id
        if self.shows_special_tokens:
            sampling = replace(sampling, skip_special_tokens=False)
        return RequestSpec(
            RequestId(f"{answer_id}-{index}"),
            prompt,
            sampling,
            cache_salt=visit.salt(body.cache_salt) if visit.tenant else body.cache_salt or "",
            model=self.served.key,
            session=body.session() or self.session or prompt_key(to_token_ids(prompt)),
            tensors=self.tensors,
            priority=body.priority or 0,
            tenant=visit.tenant,
            group=answer_id,
        )

    def use(self, index: int, prompt: int) -> RequestTrace:
        return self.visit.sequence(index, prompt, len(self.prompts[prompt]))


@dataclass(frozen=True)
class AppState:
    """A started front and the models that requests may name.

    :param models_by_name: a request that names no model gets the first one.
    :param metrics: the front's observer.
    :param ignored_fields: logs each unknown field once.
    :param ignored_hints: logs each ignored kind of ``kv_hints`` once.
    :param long_contexts: logs each context once that Ollama's clients need and is not served.
    """

    front: Front
    models_by_name: Mapping[str, ServerModel]
    metrics: ServerMetrics
    ignored_fields: OncePerName = field(
        default_factory=lambda: OncePerName("field_ignored", "field")
    )
    ignored_hints: OncePerName = field(
        default_factory=lambda: OncePerName("kv_hint_ignored", "action")
    )
    long_contexts: OncePerName = field(
        default_factory=lambda: OncePerName("context_lowered", "num_ctx")
    )

    def note(self, body: RequestBody) -> None:
        """Log each unknown field once; unknown fields have no effect."""
        if unknown := body.unknown_fields():
            self.ignored_fields.note(unknown)

    def find_model(self, name: str | None, tenant: str = "") -> tuple[str, ServerModel]:
        """Return the name and the model that a request names; None means the first model.

        The name may have a tag of Ollama's.

        :param tenant: tenant to charge with the encoding of texts.
        :raises UnknownModel: if no model has the name.
        """
        models = self.models_by_name
        if name is None:
            name = next(iter(models))
        elif name not in models:
            name = served_name(name, models, self._parameters)
        served = models[name]
        return name, replace(served, prompts=served.prompts.of(tenant)) if tenant else served

    def _parameters(self, name: str) -> int:
        return self.models_by_name[name].text.stored.parameters

    def deltas(
        self, request: ParsedRequest, samplings: Sequence[SamplingParams], *, keeps: bool = True
    ) -> Deltas:
        """Return the pieces of all answers as they arrive, each with the index of its answer.

        :param samplings: one for each prompt; all are checked before a prompt is submitted.
        :param keeps: whether pieces are kept until the request ends, though they may be sent.
        """
        body = request.body
        heading = request.heading
        choices = body.choices()
        sequences = body.sequences() if body.use_beam_search else choices
        ends = request.served.text.eos_token_ids
        has_images = bool(request.tensors)
        searches = beam_searches(body, samplings, ends, has_images=has_images)
        count = len(samplings) * sequences
        most_tokens = sequences * sum(sampling.max_tokens or 0 for sampling in samplings)
        if count > 1 and most_tokens > MOST_TOKENS_ASKED:
            remedy = f"ask for at most {MOST_TOKENS_ASKED} in all: set max_tokens or a smaller n"
            raise ChangeSomething("n", choices, f"asks for {most_tokens} tokens", remedy)
        if body.kv_hints is not None:
            self.ignored_hints.note(body.kv_hints.find_ignored())
        prompt_tokens = sum(len(ids) for ids in request.prompts)
        trace = request.visit.trace
        if trace is not None:
            trace.on_parsed(heading.model, samplings[0])
        priority = body.priority or 0
        name = body.sequences_field() if sequences > 1 else "prompt"
        reserved = Sequences(count, name, priority=priority)
        request.visit.begin(heading.answer_id, heading.model, prompt_tokens, most_tokens, reserved)
        memory = request.served.prompts.answers
        field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        kept = KeptAnswer(request.visit, memory, field, frees=not keeps)
        if any(each.logprobs is not None or each.prompt_logprobs is not None for each in samplings):
            kept.reserve([len(ids) for ids in request.prompts], samplings, sequences)
        deltas = self._answers(request, samplings, searches, kept)
        for _ in request.prompts:
            self.metrics.on_prompt(choices)
        visit = request.visit
        return _told(deltas, choices, self.metrics, visit, kept, are_counted=bool(searches))

    def _answers(
        self,
        request: ParsedRequest,
        samplings: Sequence[SamplingParams],
        searches: Sequence[BeamSearch],
        kept: KeptAnswer,
    ) -> Deltas:
        """Return the pieces of all answers, sampled or found by beam search."""
        front = self.front
        text = request.served.text
        choices = samplings[0].n
        prompts = zip(map(to_token_bytes, request.prompts), samplings, strict=True)
        if searches:
            beams = [
                beam_deltas(
                    front,
                    text,
                    request.spec(index, prompt, replace(sampling, n=1)),
                    search,
                    sampling.n,
                    first_index=index * choices,
                    deadline_seconds=request.body.deadline_seconds,
                    trace=request.use(index, index),
                    room=kept,
                )
                for index, ((prompt, sampling), search) in enumerate(
                    zip(prompts, searches, strict=True)
                )
            ]
            return merge(beams)
        each = [
            (prompt, choice)
            for prompt, sampling in prompts
            for choice in ((sampling,) if sampling.n == 1 else sampling.choices())
        ]
        return merge(
            [
                text_deltas(
                    front,
                    text,
                    request.spec(index, prompt, sampling),
                    index=index,
                    deadline_seconds=request.body.deadline_seconds,
                    trace=request.use(index, index // choices),
                    room=kept,
                )
                for index, (prompt, sampling) in enumerate(each)
            ]
        )


def heading_of(prefix: str, model: str, body: GenerationRequest) -> Heading:
    answer_id = f"{prefix}-{uuid.uuid4().hex}"
    created = int(time.time())
    return Heading(answer_id, model, created, bool(body.return_token_ids))


def counter(request: ParsedRequest) -> UsageSoFar | None:
    if not request.body.continuous_usage():
        return None
    return UsageSoFar([len(ids) for ids in request.prompts], request.body.choices())


@dataclass(frozen=True)
class BodyApi:
    """The handlers of some routes, each of which answers a body."""

    serving: AppState


Api = TypeVar("Api", bound=BodyApi)
Body = TypeVar("Body", bound=RequestBody)


def answers_body(
    answer: Callable[[Api, Body, RequestContext], Awaitable[Response]],
) -> Callable[[Api, Request, Body], Coroutine[None, None, Response]]:
    """Return the handler of a route from the method that answers its body.

    The handler logs unknown fields, names fields in errors as the client does, and cancels the
    answer when the client closes the connection.
    """

    @wraps(answer)
    async def handle(api: Api, request: Request, body: Body) -> Response:
        api.serving.note(body)
        with named_as_sent(body.name_sent):
            return await cancel_on_disconnect(request, answer(api, body, visit_of(request)))

    own, body, _ = inspect.signature(answer).parameters.values()
    request = own.replace(name="request", annotation=Request)
    setattr(handle, "__signature__", inspect.Signature([own, request, body]))  # noqa: B010
    return handle


async def cancel_on_disconnect(request: Request, answer: Awaitable[Response]) -> Response:
    """Return the answer, or cancel it and return status 499 if the client disconnects first.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else Response(status_code=CLIENT_GONE_STATUS)
    finally:
        watching.cancel()
        if not working.done():
            await cancel_all(working)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _told(
    deltas: Deltas,
    choices: int,
    metrics: ServerMetrics,
    visit: RequestContext,
    kept: KeptAnswer,
    *,
    are_counted: bool,
) -> Deltas:
    """Count the tokens; when all answers have ended, record the longest one of each prompt.

    :param are_counted: whether the visit counts the tokens otherwise: those of all beams.
    """
    longest: dict[int, int] = {}
    async with aclosing(deltas):
        async for index, delta in deltas:
            if index % choices:  # only the first answer to a prompt counts the prompt's tokens
                usage = Usage(completion_tokens=delta.usage.completion_tokens)
                delta = replace(delta, usage=usage)  # noqa: PLW2901
            if delta.finish_reason is None and not are_counted:  # nearly all pieces
                visit.uses[index].read_tokens += len(delta.token_ids)
            else:
                visit.count(replace(delta, token_ids=()) if are_counted else delta, index)
            prompt = index // choices
            tokens = delta.usage.completion_tokens
            longest[prompt] = max(longest.get(prompt, 0), tokens)
            yield index, delta
            kept.on_sent(delta)
    for tokens in longest.values():
        metrics.on_answered(tokens)
