"""``/api/chat`` and ``/api/generate``, over chat and text completions."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import FastAPI, Response
from typing_extensions import override

from kvell.server.access.visit import RequestContext
from kvell.server.answers.deltas import merge
from kvell.server.api.bodies.completions import Body, Lazy, json_response
from kvell.server.api.bodies.embeddings import cut_to
from kvell.server.api.bodies.logprobs import LikelyTokens
from kvell.server.api.bodies.ollama import AnswerWriter, Times, nanoseconds
from kvell.server.api.bodies.ollama_models import VERSION, description, loaded_entry, tag_entry
from kvell.server.api.http_errors import (
    AT_THE_START,
    OLLAMA,
    OLLAMA_DESCRIBED,
    ApiError,
    UnknownModel,
)
from kvell.server.api.routes.chat import ChatApi, Reader
from kvell.server.api.routes.completions import CompletionsApi
from kvell.server.api.routes.dialects import DialectAnswer
from kvell.server.api.routes.embeddings import EmbeddingsApi
from kvell.server.api.schemas.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from kvell.server.api.serving import BodyApi, Deltas, answers_body
from kvell.server.api.streaming import LINES_TYPE, EventStream
from kvell.server.text.text_model import TextModel
from kvell.server.text.text_stream import TextDelta

DESCRIBED = {
    200: {"description": "The answer, whole or as lines", "content": {LINES_TYPE: {}}},
    **OLLAMA_DESCRIBED,
}


class OllamaAnswersApi(BodyApi):
    """The handlers of Ollama's answers."""

    def install(self, app: FastAPI) -> None:
        for name, handler in (("chat", self.on_chat), ("generate", self.on_generate)):
            app.add_api_route(OLLAMA + name, handler, methods=["POST"], responses={**DESCRIBED})

    @answers_body
    async def on_chat(self, body: OllamaChatRequest, visit: RequestContext) -> Response:
        """Answer a conversation, as Ollama does.

        An answer is a line of JSON for each piece, with a ``message``; the last one has ``done``,
        ``done_reason``, and the numbers of tokens and nanoseconds.  With ``stream`` false, it is
        one object.  Errors are ``{"error": …}``.
        """
        return await self._answer(body, visit)

    @answers_body
    async def on_generate(self, body: OllamaGenerateRequest, visit: RequestContext) -> Response:
        """Answer a prompt, as Ollama does.

        Like ``/api/chat``, with the text as ``response``.  With ``raw``, or if the model has no
        chat template, the answer continues the prompt as it is.
        """
        return await self._answer(body, visit)

    async def _answer(
        self, body: OllamaChatRequest | OllamaGenerateRequest, visit: RequestContext
    ) -> Response:
        name, served = self.serving.find_model(body.model)
        self.serving.long_contexts.note(body.options.excess_context(served.length.reach_tokens))
        is_chat = isinstance(body, OllamaChatRequest)
        writer = AnswerWriter(body.model, is_chat, keeps=not body.stream)
        if not body.has_prompt():
            return json_response(writer.load_body())
        started_seconds = self.serving.front.now_seconds()
        if isinstance(body, OllamaGenerateRequest) and body.continues(served.text.chat_template):
            completion = body.completion().model_copy(update={"model": name})
            api = CompletionsApi(self.serving)
            _, deltas, _ = await api.answering(completion, visit, keeps=not body.stream)
            reader = Reader(None)
        else:
            chat = body.chat().model_copy(update={"model": name})
            stream = await ChatApi(self.serving).answering(chat, visit, keeps=not body.stream)
            deltas = stream.deltas
            reader = stream.reader(0)
        answer = _Answer(
            deltas,
            visit,
            reader,
            writer,
            self.serving.front.now_seconds,
            started_seconds,
            None if body.likely_tokens() is None else served.text,
        )
        return await answer.response(streams=body.stream)


class _Answer(DialectAnswer):
    """An answer that is being read.

    :param now_seconds: a monotonic clock.
    :param likely_of: model of the tokens whose log probabilities the answer has; None for none.
    """

    media_type = LINES_TYPE
    comment = None

    def __init__(
        self,
        deltas: Deltas,
        visit: RequestContext,
        reader: Reader,
        writer: AnswerWriter,
        now_seconds: Callable[[], float],
        started_seconds: float,
        likely_of: TextModel | None,
    ) -> None:
        super().__init__(deltas, visit)
        self._reader, self._writer, self._likely_of = reader, writer, likely_of
        self._now_seconds, self._started_seconds = now_seconds, started_seconds
        self._first_seconds: float | None = None

    @override
    def frame(self, event: Body) -> tuple[bytes, bytes]:
        return b"", b"\n"

    @override
    def read(self, delta: TextDelta) -> Sequence[Body]:
        if self._first_seconds is None and delta.token_ids:
            self._first_seconds = self._now_seconds()
        tokens = None
        if self._likely_of is not None:
            tokens = LikelyTokens(self._likely_of)
            tokens.append(delta.token_ids, delta.logprobs)
        return self._writer.lines(merge(self._reader.read(delta)), tokens)

    @override
    async def end(self) -> tuple[Sequence[Body], Body]:
        ended_seconds = self._now_seconds()
        first_seconds = ended_seconds if self._first_seconds is None else self._first_seconds
        times = Times(self._started_seconds, first_seconds, ended_seconds)
        reason = (self.last and self.last.finish_reason) or "stop"
        lines = self._writer.last_lines(reason, self.usage, times)
        return lines, self._writer.whole_body(reason, self.usage, times)

    @override
    def fail(self, error: ApiError) -> Body:
        return {"error": error.message}


@dataclass(frozen=True)
class OllamaModelsApi(BodyApi):
    """The handlers of Ollama's lists and descriptions of models, and of their embeddings."""

    started_unix_seconds: int

    def install(self, app: FastAPI) -> None:
        errors = dict(OLLAMA_DESCRIBED)
        lines = {**DESCRIBED}
        app.add_api_route(f"{OLLAMA}pull", self.on_pull, methods=["POST"], responses=lines)
        app.add_api_route(f"{OLLAMA}show", self.on_show, methods=["POST"], responses=errors)
        gets = (("tags", self.on_tags), ("ps", self.on_ps), ("version", self.on_version))
        for name, getter in gets:
            app.add_api_route(OLLAMA + name, getter, methods=["GET"], responses=errors)
        for name, handler in (("embed", self.on_embed), ("embeddings", self.on_embeddings)):
            app.add_api_route(OLLAMA + name, handler, methods=["POST"], responses=errors)

    async def on_tags(self) -> Response:
        """List the models that requests may name.

        ``size`` is that of a model's weight files, ``digest`` is made of its config and of the
        names, sizes and headers of these files, and ``modified_at`` is the time of their last
        change.
        """
        facts, started = self.serving.front.facts, self.started_unix_seconds
        models = self.serving.models_by_name.items()
        return json_response({"models": [tag_entry(*named, facts, started) for named in models]})

    async def on_ps(self) -> Response:
        """List the models that are loaded: all that requests may name.

        ``size`` is the memory of a model's weights and of the KV cache and activations, which
        several models share, in all instances; ``size_vram`` is the part on GPUs.
        """
        statuses = (status for status, _ in self.serving.front.instances())
        instances = [status.report.facts for status in statuses if status.report is not None]
        models = self.serving.models_by_name.items()
        started = self.started_unix_seconds
        entries = [loaded_entry(*named, instances, started) for named in models]
        return json_response({"models": entries})

    async def on_show(self, body: OllamaShowRequest) -> Response:
        """Describe a model: its kind, sizes, chat template, context and capabilities."""
        self.serving.note(body)
        named = self.serving.find_model(body.model)
        facts = self.serving.front.facts
        return json_response(description(*named, facts, self.started_unix_seconds))

    async def on_pull(self, body: OllamaPullRequest) -> Response:
        """Answer that a served model is present; the status is 404 for any other model."""
        self.serving.note(body)
        try:
            self.serving.find_model(body.model)
        except UnknownModel as error:
            raise UnknownModel(f"{error}; {AT_THE_START}") from error
        if body.stream:
            return EventStream(_pulled(), LINES_TYPE)
        return json_response({"status": "success"})

    async def on_version(self) -> Response:
        """Return the version of Ollama whose interface is served; ``/version`` has Kvell's."""
        return json_response({"version": VERSION})

    @answers_body
    async def on_embed(self, body: OllamaEmbedRequest, visit: RequestContext) -> Response:
        """Embed a text, or each of several.

        ``embeddings`` has a vector of length one for every text, in order; durations are in
        nanoseconds.  A text that is longer than the context is cut at its end, unless
        ``truncate`` is false.
        """
        serving = self.serving
        _, served = serving.find_model(body.model)
        serving.long_contexts.note(body.options.excess_context(served.length.reach_tokens))
        sent = body.openai_body()
        size = served.text.embeddings.checked_size(sent.dimensions)
        begin_seconds = serving.front.now_seconds()
        if not sent.input:  # as Ollama, which then only loads the model
            return json_response({"model": body.model, "embeddings": []})
        made = await EmbeddingsApi(serving).vectors(visit, sent, cuts_long=body.truncate)
        return json_response(
            {
                "model": body.model,
                "embeddings": Lazy(cut_to(vector, size) for vector in made.vectors()),
                "total_duration": nanoseconds(begin_seconds, serving.front.now_seconds()),
                "load_duration": 0,
                "prompt_eval_count": made.usage.prompt_tokens,
            }
        )

    @answers_body
    async def on_embeddings(self, body: OllamaEmbeddingsRequest, visit: RequestContext) -> Response:
        """Embed a text; the older form of ``/api/embed``."""
        self.serving.find_model(body.model)
        if not body.prompt:
            return json_response({"embedding": []})
        sent = body.openai_body()
        made = await EmbeddingsApi(self.serving).vectors(visit, sent, cuts_long=True)
        return json_response({"embedding": made.vectors()[0]})


async def _pulled() -> AsyncGenerator[bytes, None]:
    for status in ("pulling manifest", "success"):
        yield msgspec.json.encode({"status": status}) + b"\n"
