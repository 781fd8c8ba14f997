"""Ollama's API below ``/api``, over chat and text completions."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import FastAPI, Request, Response

from kvell.release import RELEASE
from kvell.server.access.visit import RequestContext
from kvell.server.answers.deltas import AnswerDelta, Content, merge
from kvell.server.api.bodies.completions import Body
from kvell.server.api.bodies.ollama import AnswerWriter, Times, model_description, model_entry
from kvell.server.api.bodies.pieces import event_pieces, is_long, json_response
from kvell.server.api.door.access_guard import visit_of
from kvell.server.api.http_errors import OLLAMA, OLLAMA_DESCRIBED, api_error
from kvell.server.api.routes.chat import ChatApi
from kvell.server.api.routes.completions import CompletionsApi
from kvell.server.api.schemas.ollama.requests import (
    LATEST,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from kvell.server.api.sent_names import named_as_sent
from kvell.server.api.serving import AppState, Deltas, ServerModel, cancel_on_disconnect
from kvell.server.api.streaming import LINES_TYPE, EventStream, json_line, prime
from kvell.server.text.text_stream import TextDelta, Usage

DESCRIBED = {
    200: {"description": "The answer, whole or as lines", "content": {LINES_TYPE: {}}},
    **OLLAMA_DESCRIBED,
}


@dataclass(frozen=True)
class OllamaApi:
    """The handlers of Ollama's API."""

    serving: AppState
    started_unix_seconds: int

    def install(self, app: FastAPI) -> None:
        """Add the routes."""
        for name, handler in (("chat", self.on_chat), ("generate", self.on_generate)):
            app.add_api_route(OLLAMA + name, handler, methods=["POST"], responses={**DESCRIBED})
        errors = dict(OLLAMA_DESCRIBED)
        app.add_api_route(f"{OLLAMA}show", self.on_show, methods=["POST"], responses=errors)
        for name in ("tags", "ps"):
            app.add_api_route(OLLAMA + name, self.on_list, methods=["GET"], responses=errors)
        app.add_api_route(f"{OLLAMA}version", self.on_version, methods=["GET"], responses=errors)

    async def on_chat(self, request: Request, body: OllamaChatRequest) -> Response:
        """Answer a conversation, as Ollama does.

        An answer is a line of JSON for each piece, with a ``message``; the last one has ``done``,
        ``done_reason``, and the numbers of tokens and nanoseconds.  With ``stream`` false, it is
        one object.  Errors are ``{"error": …}``.
        """
        return await cancel_on_disconnect(request, self._answer(body, visit_of(request)))

    async def on_generate(self, request: Request, body: OllamaGenerateRequest) -> Response:
        """Answer a prompt, as Ollama does.

        Like ``/api/chat``, with the text as ``response``.  With ``raw``, or if the model has no
        chat template, the answer continues the prompt as it is.
        """
        return await cancel_on_disconnect(request, self._answer(body, visit_of(request)))

    async def on_show(self, body: OllamaShowRequest) -> Response:
        """Describe a model: its kind, chat template, context and capabilities."""
        self.serving.note(body)
        return json_response(model_description(self._model(body.model)[1]))

    async def on_list(self) -> Response:
        """List the models that requests may name; all of them are loaded.

        A model's digest is that of its name, and its time that of the server's start.
        """
        models = self.serving.models_by_name.items()
        entries = [model_entry(*named, self.started_unix_seconds) for named in models]
        return json_response({"models": entries})

    async def on_version(self) -> Response:
        """Return the version of Kvell."""
        return json_response({"version": RELEASE})

    def _model(self, name: str) -> tuple[str, ServerModel]:
        """Return the name and the model that a request names, with or without its tag."""
        if name not in self.serving.models_by_name:
            name = name.removesuffix(LATEST)
        return self.serving.find_model(name)

    async def _answer(
        self, body: OllamaChatRequest | OllamaGenerateRequest, visit: RequestContext
    ) -> Response:
        self.serving.note(body)
        name, served = self._model(body.model)
        body.check_context(served.length.reach_tokens)
        writer = AnswerWriter(body.model, is_chat=isinstance(body, OllamaChatRequest))
        if not body.has_prompt():
            return json_response(writer.load_body())
        with named_as_sent(body.ollama_name):
            started_seconds = self.serving.front.now_seconds()
            answer = _Answer(
                *await self._submitted(body, name, served, visit),
                writer,
                visit,
                self.serving.front.now_seconds,
                started_seconds,
            )
            if body.stream:
                lines = await prime(answer.lines(), visit.when_accepted)
                return EventStream(lines, LINES_TYPE)
            return json_response(await answer.read_all())

    async def _submitted(
        self,
        body: OllamaChatRequest | OllamaGenerateRequest,
        name: str,
        served: ServerModel,
        visit: RequestContext,
    ) -> "tuple[Deltas, Callable[[TextDelta], Sequence[AnswerDelta]]]":
        """Submit a request; return the pieces of its answer, and the function that reads them."""
        if isinstance(body, OllamaGenerateRequest) and (body.raw or not served.text.chat_template):
            completion = body.completion().model_copy(update={"model": name})
            _, deltas, _ = await CompletionsApi(self.serving).answering(completion, visit)
            return deltas, _text_part
        chat = body.chat().model_copy(update={"model": name})
        stream = await ChatApi(self.serving).answering(chat, visit)
        reader = stream.reader(0)
        return stream.deltas, lambda delta: merge(reader.read(delta))


@dataclass
class _Answer:
    """An answer that is being read.

    :param read: returns the parts of a piece.
    :param now_seconds: a monotonic clock.
    """

    deltas: Deltas
    read: Callable[[TextDelta], Sequence[AnswerDelta]]
    writer: AnswerWriter
    visit: RequestContext
    now_seconds: Callable[[], float]
    started_seconds: float
    usage: Usage = field(default_factory=Usage)
    reason: str = "stop"
    first_seconds: float | None = None

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a stream; a failure of an accepted request becomes a line."""
        is_begun = False
        try:
            async with aclosing(self.deltas) as deltas:
                async for _, delta in deltas:
                    for line in self.writer.lines(self._noted(delta)):
                        is_begun = True
                        async for piece in _written(line):
                            yield piece
            for line in self.writer.last_lines(self.reason, self.usage, self._times()):
                async for piece in _written(line):
                    yield piece
        except Exception as error:
            if not (is_begun or self.visit.is_accepted):
                raise
            yield json_line({"error": api_error(error).message})

    async def read_all(self) -> Body:
        """Return the whole answer."""
        async with aclosing(self.deltas) as deltas:
            async for _, delta in deltas:
                self.writer.lines(self._noted(delta))
        return self.writer.whole_body(self.reason, self.usage, self._times())

    def _noted(self, delta: TextDelta) -> Sequence[AnswerDelta]:
        """Return the parts of a piece, and note its usage and its time."""
        self.usage += delta.usage
        self.reason = delta.finish_reason or self.reason
        if self.first_seconds is None and delta.token_ids:
            self.first_seconds = self.now_seconds()
        return self.read(delta)

    def _times(self) -> Times:
        ended_seconds = self.now_seconds()
        first_seconds = ended_seconds if self.first_seconds is None else self.first_seconds
        return Times(self.started_seconds, first_seconds, ended_seconds)


async def _written(line: Body) -> AsyncGenerator[bytes, None]:
    """Yield a line of JSON, in pieces if it is long."""
    if not is_long(line):
        yield json_line(line)
        return
    async for piece in event_pieces(line, b"", b"\n"):
        yield piece


def _text_part(delta: TextDelta) -> Sequence[AnswerDelta]:
    return [Content(delta.text)] if delta.text else []
