"""OpenAI's API over a front."""

import os
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from kvell.device.process_size import process_bytes
from kvell.engine.protocol.messages import Stats
from kvell.errors import TryLater
from kvell.server.api import http_errors, responses
from kvell.server.api.cluster_api import ClusterApi
from kvell.server.api.guards import ApiKeyGuard, BodyLimit
from kvell.server.api.http_errors import UnknownModel
from kvell.server.api.prompts import PromptEncoder, TokenIds
from kvell.server.api.responses import Body, Heading
from kvell.server.api.schemas import ChatRequest, CompletionRequest, GenerationRequest
from kvell.server.api.serve_options import MAX_BODY_BYTES
from kvell.server.api.streaming import (
    ClientGone,
    EventStream,
    collected,
    merged,
    primed,
    sse,
    until_gone,
    with_error_event,
)
from kvell.server.front.front import Front
from kvell.server.metrics.front_metrics import CONTENT_TYPE, ServerMetrics
from kvell.server.metrics.instance_metrics import InstanceFigures
from kvell.server.metrics.memory_page import InstanceMemory, memory_page
from kvell.server.text.session_key import conversation_key, prompt_key
from kvell.server.text.text_model import PreparedPrompt, TextModel
from kvell.server.text.text_stream import TextDelta, Usage, text_deltas
from kvell.server.text.usage_so_far import UsageSoFar

STATS_SECONDS = 2.0
CLIENT_GONE_STATUS = 499
Deltas = AsyncGenerator[tuple[int, TextDelta], None]


@dataclass(frozen=True)
class Served:
    """A model that requests may name.

    :param key: what the instance calls it: "" for its first.
    """

    text: TextModel
    prompts: PromptEncoder
    key: str
    max_model_len: int


@dataclass(frozen=True)
class Api:
    """What the handlers work with.

    :param front: a started front.
    :param models_by_name: what requests may name, the first for those that name none.
    :param metrics: the observer that was given to the front.
    :param floor_bytes: of this process before it served anything.
    """

    front: Front
    models_by_name: Mapping[str, Served]
    metrics: ServerMetrics
    started_unix_seconds: int
    floor_bytes: int = 0

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        """``/v1/completions``."""
        name, served = self._served(body)
        heading = _heading("cmpl", name, body)
        return await _guarded(request, self._complete(served, heading, body))

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """``/v1/chat/completions``."""
        name, served = self._served(body)
        heading = _heading("chatcmpl", name, body)
        return await _guarded(request, self._chat(served, heading, body))

    async def models(self) -> Response:
        """``/v1/models``."""
        lengths = {name: one.max_model_len for name, one in self.models_by_name.items()}
        return _json(responses.model_list(lengths, self.started_unix_seconds))

    async def health(self) -> Response:
        """``/health``: 200 while the instance serves, else 503."""
        status = 200 if self.front.state == "serving" else 503
        return _json({"status": self.front.state}, status)

    async def prometheus(self) -> Response:
        """``/metrics``."""
        told = await self._stats()
        self.metrics.instances.front_waiting = self.front.waiting
        self.metrics.instances.instances = {
            one.instance_id: InstanceFigures(told.get(one.instance_id), one.ready, one.restarts)
            for one, _ in self.front.instances()
        }
        return Response(self.metrics.render(), media_type=CONTENT_TYPE)

    async def memory(self) -> Response:
        """``/debug/memory``; 503 while no instance answers."""
        told = await self._stats()
        known = {
            one.instance_id: InstanceMemory(one.ready, told[one.instance_id], one.pid)
            for one, _ in self.front.instances()
            if one.ready is not None and one.instance_id in told
        }
        if not known:
            return _json({"error": f"no instance answers just now ({self.front.state})"}, 503)
        return _json(memory_page(known, self.floor_bytes))

    async def audit(self) -> Response:
        """``/debug/audit``: every contradiction that instances find; 503 while none answers."""
        told = await self._stats(with_audit=True)
        if not told:
            return _json({"error": f"no instance answers just now ({self.front.state})"}, 503)
        problems = {name: list(stats.problems or ()) for name, stats in told.items()}
        return _json({"clean": not any(problems.values()), "problems": problems})

    async def _stats(self, *, with_audit: bool = False) -> dict[str, Stats]:
        """What each instance says within a bounded time; those that are silent are left out."""
        try:
            return await self.front.stats(STATS_SECONDS, with_audit=with_audit)
        except TryLater:
            return {}

    async def _complete(
        self, served: Served, heading: Heading, body: CompletionRequest
    ) -> Response:
        prompts = [await served.prompts.prompt(prompt) for prompt in body.prompts()]
        deltas = self._serve(served, heading, prompts, body, "")
        if body.stream:
            so_far = _counter(prompts, body)
            events = _completion_events(heading, deltas, body.include_usage(), so_far)
            return await _stream(events)
        answers = await collected(deltas, len(prompts) * body.choices())
        joined = [responses.joined(answer) for answer in answers]
        return _json(responses.completion_body(heading, joined))

    async def _chat(self, served: Served, heading: Heading, body: ChatRequest) -> Response:
        prompt = await served.prompts.chat(body.messages)
        session = conversation_key(one.model_dump() for one in body.messages)
        deltas = self._serve(served, heading, [prompt], body, session)
        if body.stream:
            so_far = _counter([prompt], body)
            return await _stream(_chat_events(heading, deltas, body.include_usage(), so_far))
        answers = await collected(deltas, body.choices())
        joined = [responses.joined(answer) for answer in answers]
        return _json(responses.chat_body(heading, joined))

    def _serve(
        self,
        served: Served,
        heading: Heading,
        prompts: Sequence[TokenIds],
        body: GenerationRequest,
        session: str,
    ) -> Deltas:
        # All sampling parameters are checked before the first prompt is submitted.
        samplings = [body.sampling(served.prompts.room_tokens(ids)).choices() for ids in prompts]
        asked = [(ids, one) for ids, some in zip(prompts, samplings, strict=True) for one in some]
        salt = body.cache_salt or ""
        sessions = [body.prompt_cache_key or session or prompt_key(ids) for ids, _ in asked]
        answers = [
            text_deltas(
                self.front,
                served.text,
                PreparedPrompt(ids, f"{heading.answer_id}-{i}", salt, served.key, sessions[i]),
                sampling,
            )
            for i, (ids, sampling) in enumerate(asked)
        ]
        for _ in prompts:
            self.metrics.asked(body.choices())
        deltas = merged(answers)
        if body.choices() > 1:
            deltas = _prompts_counted_once(deltas, body.choices())
        return _told(deltas, body.choices(), self.metrics)

    def _served(self, body: GenerationRequest) -> tuple[str, Served]:
        """The model that a request names, and its name; who names none means the first."""
        name = next(iter(self.models_by_name)) if body.model is None else body.model
        served = self.models_by_name.get(name)
        if served is None:
            names = ", ".join(self.models_by_name)
            raise UnknownModel(f"model={name[:200]}: is not served; use {names}")
        return name, served


def _heading(prefix: str, model: str, body: GenerationRequest) -> Heading:
    answer_id, created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
    return Heading(answer_id, model, created, bool(body.return_token_ids))


async def _prompts_counted_once(deltas: Deltas, choices: int) -> Deltas:
    """Of several answers to one prompt only the first counts the prompt's tokens."""
    async with aclosing(deltas):
        async for index, delta in deltas:
            first = index % choices == 0
            yield index, delta if first else replace(delta, usage=delta.usage.without_prompt())


async def _told(deltas: Deltas, choices: int, metrics: ServerMetrics) -> Deltas:
    """Tell of each prompt, once all its answers are there, how long the longest is."""
    longest: dict[int, int] = {}
    async with aclosing(deltas):
        async for index, delta in deltas:
            prompt, tokens = index // choices, delta.usage.completion_tokens
            longest[prompt] = max(longest.get(prompt, 0), tokens)
            yield index, delta
    for tokens in longest.values():
        metrics.answered(tokens)


def _counter(prompts: Sequence[TokenIds], body: GenerationRequest) -> UsageSoFar | None:
    """Of what is used so far, for whoever wants to know it with every piece."""
    if not body.continuous_usage():
        return None
    return UsageSoFar([len(ids) for ids in prompts], body.choices())


async def _completion_events(
    heading: Heading, deltas: Deltas, include_usage: bool, so_far: UsageSoFar | None
) -> AsyncGenerator[bytes, None]:
    total = Usage()
    async for index, delta in deltas:
        total += delta.usage
        used = None if so_far is None else so_far.after(index, delta)
        yield sse(responses.completion_chunk(heading, index, delta, used))
    if include_usage:
        yield sse(responses.usage_chunk(heading, "text_completion", total))


async def _chat_events(
    heading: Heading, deltas: Deltas, include_usage: bool, so_far: UsageSoFar | None
) -> AsyncGenerator[bytes, None]:
    total, opened = Usage(), set[int]()
    async for index, delta in deltas:
        if index not in opened:
            opened.add(index)
            yield sse(responses.chat_opening(heading, index))
        total += delta.usage
        used = None if so_far is None else so_far.after(index, delta)
        yield sse(responses.chat_chunk(heading, index, delta, used))
    if include_usage:
        yield sse(responses.usage_chunk(heading, "chat.completion.chunk", total))


async def _stream(events: AsyncGenerator[bytes, None]) -> Response:
    return EventStream(with_error_event(await primed(events)))


async def _guarded(request: Request, answer: Any) -> Response:
    try:
        return await until_gone(request, answer)
    except ClientGone:
        return Response(status_code=CLIENT_GONE_STATUS)


def _json(body: Body, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _served(text: TextModel, key: str, max_model_len: int) -> Served:
    return Served(text, PromptEncoder(text, max_model_len), key, max_model_len)


def build_app(
    front: Front,
    model: TextModel,
    metrics: ServerMetrics,
    *,
    api_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    beside: Sequence[TextModel] = (),
    floor_bytes: int = 0,
) -> FastAPI:
    """The ASGI app over a started front.

    :param model: the first that the instance serves; ``beside`` are the others.
    :param metrics: the observer that was given to the front.
    :param api_key: when given, ``/v1/`` answers only to it.
    :param floor_bytes: of this process before it loaded anything; 0 takes what it is now.
    """
    ready = front.ready
    first = _served(model, "", ready.max_model_len)
    others = [_served(one, one.name, ready.beside[one.name]) for one in beside]
    models = {one.text.name: one for one in (first, *others)}
    api = Api(front, models, metrics, int(time.time()), floor_bytes or process_bytes())
    app = FastAPI(title="Kvell", docs_url=None, redoc_url=None)
    app.add_api_route("/v1/completions", api.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"])
    app.add_api_route("/v1/models", api.models, methods=["GET"])
    app.add_api_route("/health", api.health, methods=["GET"])
    app.add_api_route("/metrics", api.prometheus, methods=["GET"])
    app.add_api_route("/debug/memory", api.memory, methods=["GET"])
    app.add_api_route("/debug/audit", api.audit, methods=["GET"])
    ClusterApi(front, api.floor_bytes, os.getpid()).install(app)
    http_errors.install(app)
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes)
    if api_key is not None:
        app.add_middleware(ApiKeyGuard, api_key=api_key)
    return app
