"""``/v1/embeddings``: the vector of each input."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from fastapi import FastAPI, Request, Response
from numpy.typing import NDArray

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.pooling import POOLED, vector_of
from kvell.engine.protocol.request_spec import RequestSpec, to_token_bytes
from kvell.errors import ChangeSomething
from kvell.server.access.visit import RequestContext, Sequences
from kvell.server.api.bodies.embeddings import cut_to, embeddings_body
from kvell.server.api.bodies.pieces import json_response
from kvell.server.api.door.access_guard import visit_of
from kvell.server.api.prompt_form import TEXT_FORM, PromptForm, form_cut_at_end
from kvell.server.api.schemas.embeddings import MAX_INPUT_TOKENS, EmbeddingsRequest
from kvell.server.api.serving import AppState, ServerModel, cancel_on_disconnect
from kvell.server.text.embeddings import all_embedded
from kvell.server.text.session_key import prompt_key
from kvell.server.text.several.side_by_side import MOST_AT_ONCE
from kvell.server.text.text_encoder import TokenIds
from kvell.server.text.text_stream import TextDelta, Usage
from kvell.vocabulary import RequestId

PATH = "/v1/embeddings"
VECTOR_BYTES = 1 << 10
"""Bytes of a request for a vector, without the vector's numbers."""


@dataclass(frozen=True)
class EmbeddingsApi:
    """The handler of embeddings."""

    serving: AppState

    def install(self, app: FastAPI) -> None:
        """Add the route."""
        app.add_api_route(PATH, self.embeddings, methods=["POST"])

    async def embeddings(self, request: Request, body: EmbeddingsRequest) -> Response:
        """Embed a text, or each of several.

        ``data`` has a vector of length one for every input, in order: that of its last token.
        ``usage`` counts tokens, including cached ones.  Nothing is streamed.
        """
        return await cancel_on_disconnect(request, self._answer(visit_of(request), body))

    async def _answer(self, visit: RequestContext, body: EmbeddingsRequest) -> Response:
        self.serving.note(body)
        _, served = self.serving.find_model(body.model)
        size = served.text.embeddings.checked_size(body.dimensions)
        made = await self.vectors(visit, body)
        vectors = (cut_to(vector_of(end.embedding), size) for end in made.ends)
        return json_response(embeddings_body(made.model, vectors, body.encoding(), made.usage))

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
