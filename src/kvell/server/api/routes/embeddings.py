"""``/v1/embeddings``: the vector of each input."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from fastapi import FastAPI, Response
from numpy.typing import NDArray

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.pooling import POOLED, similarities, vector_of
from kvell.engine.protocol.request_spec import RequestSpec, to_token_bytes
from kvell.errors import ChangeSomething
from kvell.front.routes import prompt_key
from kvell.server.access.visit import RequestContext, Sequences
from kvell.server.api.bodies.completions import json_response
from kvell.server.api.bodies.embeddings import cut_to, embeddings_body, rerank_body, scores_body
from kvell.server.api.schemas.embeddings import (
    MAX_INPUT_TOKENS,
    EmbeddingsRequest,
    RerankRequest,
    ScoredRequest,
    ScoreRequest,
)
from kvell.server.api.serving import BodyApi, ServerModel, answers_body
from kvell.server.text.embeddings import all_embedded
from kvell.server.text.several.beam_search import MOST_AT_ONCE
from kvell.server.text.text_encoder import TEXT_FORM, PromptForm, TokenIds, form_cut_at_end
from kvell.server.text.text_stream import TextDelta, Usage
from kvell.vocabulary import RequestId

PATH = "/v1/embeddings"
VECTOR_BYTES = 1 << 10
"""Bytes of a request for a vector, without the vector's numbers."""


class EmbeddingsApi(BodyApi):
    """The handler of embeddings."""

    def install(self, app: FastAPI) -> None:
        app.add_api_route(PATH, self.embeddings, methods=["POST"])

    @answers_body
    async def embeddings(self, body: EmbeddingsRequest, visit: RequestContext) -> Response:
        """Embed a text, or each of several.

        ``data`` has a vector of length one for every input, in order: that of its last token.
        ``usage`` counts tokens, including cached ones.  Nothing is streamed.
        """
        _, served = self.serving.find_model(body.model)
        size = served.text.embeddings.checked_size(body.dimensions)
        made = await self.vectors(visit, body)
        vectors = (cut_to(vector_of(end.embedding), size) for end in made.ends)
        encoding = body.encoding_format or "float"
        return json_response(embeddings_body(made.model, vectors, encoding, made.usage))

    async def vectors(
        self,
        visit: RequestContext,
        body: EmbeddingsRequest,
        prefix: str = "embd",
        fields: Sequence[str] = (),
        *,
        cuts_long: bool = False,
    ) -> "EmbeddingResult":
        """Embed all inputs, within the limits of the key.

        :param prefix: prefix of the answer's id.
        :param fields: request field of each input, for errors; empty means ``input``.
        :param cuts_long: whether inputs that are too long are cut at their ends instead of refused.
        :raises ChangeSomething: naming an invalid input, or a model without embeddings.
        """
        name, served = self.serving.find_model(body.model, visit.tenant)
        served.text.embeddings.require_served(name)
        fields = fields or ["input"] * len(body.inputs())
        form = form_cut_at_end(served.text.eos_token_ids) if cuts_long else TEXT_FORM
        inputs = await _encoded(served, body, fields, form)
        answer_id = f"{prefix}-{uuid.uuid4().hex}"
        trace = visit.trace
        if trace is not None:
            trace.on_parsed(name, POOLED)
        priority = body.priority or 0
        sequences = Sequences(len(inputs), fields[-1], MOST_AT_ONCE, priority)
        visit.begin(answer_id, name, sum(map(len, inputs)), 0, sequences)
        size_bytes = VECTOR_BYTES + 4 * served.text.embeddings.size
        visit.keep(served.prompts.answers.texts, len(inputs) * size_bytes)
        salt = visit.salt(body.cache_salt)
        specs = [
            RequestSpec(
                RequestId(f"{answer_id}-{index}"),
                to_token_bytes(ids),
                POOLED,
                cache_salt=salt,
                model=served.key,
                session=body.prompt_cache_key or prompt_key(ids),
                priority=priority,
                pooling="last",
                tenant=visit.tenant,
                group=answer_id,
            )
            for index, ids in enumerate(inputs)
        ]
        traces = [visit.sequence(index, index, len(ids)) for index, ids in enumerate(inputs)]
        ends = await all_embedded(self.serving.front, specs, traces)
        cached_tokens = sum(end.cached_tokens for end in ends)
        written_tokens = sum(end.cache_write_tokens for end in ends)
        usage = Usage(sum(map(len, inputs)), 0, cached_tokens, written_tokens)
        visit.count(TextDelta("", usage=usage))
        return EmbeddingResult(answer_id, name, ends, usage)


@dataclass(frozen=True)
class EmbeddingResult:
    """The results of embedding, in the order of the inputs."""

    answer_id: str
    model: str
    ends: Sequence[Finished]
    usage: Usage

    def vectors(self) -> list[NDArray[np.float32]]:
        return [vector_of(end.embedding) for end in self.ends]


async def _encoded(
    served: ServerModel, body: EmbeddingsRequest, fields: Sequence[str], form: PromptForm
) -> list[TokenIds]:
    """Return the token ids of all inputs.

    :raises ChangeSomething: if an input is empty or too long, or all together are too long.
    """
    encoded: list[TokenIds] = []
    total = 0
    for given, field in zip(body.inputs(), fields, strict=True):
        encoded.append(await served.prompts.prompt(given, field=field, answer_tokens=0, form=form))
        total += len(encoded[-1])
        if total > MAX_INPUT_TOKENS:
            problem = f"exceeds the {MAX_INPUT_TOKENS} tokens of one request"
            raise ChangeSomething(field, f"{total} tokens", problem, "send it in several")
    return encoded


SCORE_PATHS = ("/score", "/v1/score")
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")


class ScoresApi(BodyApi):
    """The handlers of scores, which use the handler of embeddings."""

    def install(self, app: FastAPI) -> None:
        for path in SCORE_PATHS:
            app.add_api_route(path, self.score, methods=["POST"])
        for path in RERANK_PATHS:
            app.add_api_route(path, self.rerank, methods=["POST"])

    @answers_body
    async def score(self, body: ScoreRequest, visit: RequestContext) -> Response:
        """Return the similarity of two texts, or of each of several pairs.

        ``data`` has a ``score`` for every pair, in order: the cosine of the two texts' embeddings,
        from -1 to 1.  ``usage`` counts tokens, including cached ones.
        """
        made, scores = await self._similar(visit, body, "score")
        created = int(time.time())
        return json_response(scores_body(made.answer_id, created, made.model, scores, made.usage))

    @answers_body
    async def rerank(self, body: RerankRequest, visit: RequestContext) -> Response:
        """Sort documents by relevance to a query, the most relevant first.

        ``results`` have the ``index`` of a document, the ``document`` and its ``relevance_score``:
        the cosine of its embedding and the query's, from -1 to 1.
        """
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
        by_field = body.texts_by_field()
        ones, _ = by_field.values()
        fields = [field for field, texts in by_field.items() for _ in texts]
        api = EmbeddingsApi(self.serving)
        made = await api.vectors(visit, body.to_embeddings(), prefix, fields)

        def compared() -> list[float]:
            vectors = made.vectors()
            return similarities(vectors[: len(ones)], vectors[len(ones) :])

        return made, await asyncio.to_thread(compared)
