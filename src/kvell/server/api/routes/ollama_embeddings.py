"""``/api/embed`` and ``/api/embeddings``, over ``/v1/embeddings``."""

from dataclasses import dataclass

from fastapi import FastAPI, Request, Response

from kvell.server.access.visit import RequestContext
from kvell.server.api.bodies.embeddings import cut_to
from kvell.server.api.bodies.ollama import nanoseconds
from kvell.server.api.bodies.pieces import Lazy, json_response
from kvell.server.api.door.access_guard import visit_of
from kvell.server.api.http_errors import OLLAMA, OLLAMA_DESCRIBED
from kvell.server.api.routes.embeddings import EmbeddingsApi
from kvell.server.api.schemas.ollama.embeddings import (
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)
from kvell.server.api.sent_names import named_as_sent
from kvell.server.api.serving import cancel_on_disconnect


@dataclass(frozen=True)
class OllamaEmbeddingsApi:
    """The handlers of Ollama's embeddings."""

    embeddings: EmbeddingsApi

    def install(self, app: FastAPI) -> None:
        """Add the routes."""
        errors = dict(OLLAMA_DESCRIBED)
        for name, handler in (("embed", self.on_embed), ("embeddings", self.on_embeddings)):
            app.add_api_route(OLLAMA + name, handler, methods=["POST"], responses=errors)

    async def on_embed(self, request: Request, body: OllamaEmbedRequest) -> Response:
        """Embed a text, or each of several.

        ``embeddings`` has a vector of length one for every text, in order; durations are in
        nanoseconds.  A text that is longer than the context is cut at its end, unless
        ``truncate`` is false.
        """
        return await cancel_on_disconnect(request, self._embedded(visit_of(request), body))

    async def on_embeddings(self, request: Request, body: OllamaEmbeddingsRequest) -> Response:
        """Embed a text; the older form of ``/api/embed``."""
        return await cancel_on_disconnect(request, self._embedding(visit_of(request), body))

    async def _embedded(self, visit: RequestContext, body: OllamaEmbedRequest) -> Response:
        serving = self.embeddings.serving
        serving.note(body)
        _, served = serving.find_model(body.model)
        serving.long_contexts.note(body.options.excess_context(served.length.reach_tokens))
        sent = body.openai_body()
        size = served.text.embeddings.checked_size(sent.dimensions)
        begin_seconds = serving.front.now_seconds()
        if not sent.input:  # as Ollama, which then only loads the model
            return json_response({"model": body.model, "embeddings": []})
        made = await self.embeddings.vectors(visit, sent, cuts_long=body.truncate)
        return json_response(
            {
                "model": body.model,
                "embeddings": Lazy(cut_to(vector, size) for vector in made.vectors()),
                "total_duration": nanoseconds(begin_seconds, serving.front.now_seconds()),
                "load_duration": 0,
                "prompt_eval_count": made.usage.prompt_tokens,
            }
        )

    async def _embedding(self, visit: RequestContext, body: OllamaEmbeddingsRequest) -> Response:
        self.embeddings.serving.note(body)
        self.embeddings.serving.find_model(body.model)
        if not body.prompt:
            return json_response({"embedding": []})
        with named_as_sent(body.ollama_name):
            made = await self.embeddings.vectors(visit, body.openai_body(), cuts_long=True)
        return json_response({"embedding": made.vectors()[0]})
