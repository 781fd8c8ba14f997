"""``/score`` and ``/rerank``: similarity of texts, by the cosine of their embeddings."""

import asyncio
import time
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response

from kvell.engine.protocol.pooling import similarities
from kvell.server.access.visit import RequestContext
from kvell.server.api.bodies.pieces import json_response
from kvell.server.api.bodies.scores import rerank_body, scores_body
from kvell.server.api.door.access_guard import visit_of
from kvell.server.api.routes.embeddings import EmbeddingResult, EmbeddingsApi
from kvell.server.api.schemas.scores import RerankRequest, ScoredRequest, ScoreRequest
from kvell.server.api.serving import cancel_on_disconnect

SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


@dataclass(frozen=True)
class ScoresApi:
    """The handlers of scores, which use the handler of embeddings."""

    embeddings: EmbeddingsApi

    def install(self, app: FastAPI) -> None:
        """Add the routes."""
        for path in SCORE_PATHS:
            app.add_api_route(path, self.score, methods=["POST"])
        for path in RERANK_PATHS:
            app.add_api_route(path, self.rerank, methods=["POST"])

    async def score(self, request: Request, body: ScoreRequest) -> Response:
        """Return the similarity of two texts, or of each of several pairs.

        ``data`` has a ``score`` for every pair, in order: the cosine of the two texts' embeddings,
        from -1 to 1.  ``usage`` counts tokens, including cached ones.
        """
        return await cancel_on_disconnect(request, self._scored(visit_of(request), body))

    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        """Sort documents by relevance to a query, the most relevant first.

        ``results`` have the ``index`` of a document, the ``document`` and its ``relevance_score``:
        the cosine of its embedding and the query's, from -1 to 1.
        """
        return await cancel_on_disconnect(request, self._reranked(visit_of(request), body))

    async def _scored(self, visit: RequestContext, body: ScoreRequest) -> Response:
        made, scores = await self._similar(visit, body, "score")
        created = int(time.time())
        return json_response(scores_body(made.answer_id, created, made.model, scores, made.usage))

    async def _reranked(self, visit: RequestContext, body: RerankRequest) -> Response:
        made, scores = await self._similar(visit, body, "rerank")
        answer = rerank_body(
            made.answer_id,
            made.model,
            scores,
            body.texts_by_field()["documents"],
            made.usage,
            limit=body.top_n or len(scores),
            tells_documents=body.return_documents is not False,
        )
        return json_response(answer)

    async def _similar(
        self, visit: RequestContext, body: ScoredRequest, prefix: str
    ) -> tuple[EmbeddingResult, list[float]]:
        """Embed all texts and compare them."""
        self.embeddings.serving.note(body)
        ones, _ = body.texts_by_field().values()
        made = await self.embeddings.vectors(visit, body.to_embeddings(), prefix, body.fields())

        def compared() -> list[float]:
            vectors = made.vectors()
            return similarities(vectors[: len(ones)], vectors[len(ones) :])

        return made, await asyncio.to_thread(compared)
