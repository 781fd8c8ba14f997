"""Answers that wait to be read are counted by tenant, and given back when their requests end."""

from typing import Any, cast

import pytest
from starlette.requests import Request

from kvell.clock import VirtualClock
from kvell.engine.requests.turns import EqualParts
from kvell.errors import TryLater
from kvell.server.access.visit import RequestContext
from kvell.server.api.prompts import PromptEncoder
from kvell.server.api.routes.embeddings import EmbeddingsApi
from kvell.server.api.routes.models import ModelsApi
from kvell.server.api.schemas.chat import DetokenizeRequest, TokenizeRequest
from kvell.server.api.schemas.embeddings import EmbeddingsRequest
from kvell.server.text.lanes import TextWork
from kvell.server.text.text_bounds import ContextLength
from kvell.testing.instance import ByteText

MOST = 4096


class Served:
    """One model, and the memory of its answers."""

    key = ""

    def __init__(self) -> None:
        self.text = ByteText()
        self.work = TextWork()
        self.work.answers.texts = EqualParts(MOST, "answer_bytes", "bytes wait")
        self.length = ContextLength(1 << 20)
        self.prompts = PromptEncoder(self.text, self.length, self.work)

    def note(self, _body: object) -> None:
        """Ignore unknown fields."""

    def find_model(self, name: str | None, _tenant: str = "") -> tuple[str, "Served"]:
        return name or "fake", self

    @property
    def waiting_bytes(self) -> int:
        return self.work.answers.texts.total


def visited(tenant: str) -> tuple[RequestContext, Request]:
    visit = RequestContext("POST", "/", tenant, None, VirtualClock())
    return visit, Request({"type": "http", "state": {"visit": visit}})


async def detokenize(served: Served, request: Request, tokens: int) -> object:
    body = DetokenizeRequest(tokens=[ord("a")] * tokens)
    return await ModelsApi(cast(Any, served), 0).detokenize(request, body)


async def tokenize(served: Served, request: Request, tokens: int) -> object:
    body = TokenizeRequest(prompt="a" * (tokens // 4), return_token_strs=True)
    return await ModelsApi(cast(Any, served), 0).tokenize(request, body)


@pytest.mark.parametrize("answer", [detokenize, tokenize])
async def test_answers_that_nobody_reads_are_bounded_by_tenant(answer: Any) -> None:
    served, visits = Served(), []
    with pytest.raises(TryLater, match="bytes wait") as refused:
        for _ in range(5):
            visit, request = visited("a")
            visits.append(visit)
            await answer(served, request, MOST // 4)
    assert refused.value.bound == "answer_bytes"
    assert len(visits) == 5 and served.waiting_bytes <= MOST
    other, request = visited("b")
    await answer(served, request, MOST // 4)
    for visit in [*visits, other]:
        visit.end(200)
    assert served.waiting_bytes == 0
    served.work.close()


async def test_vectors_are_counted_before_they_are_computed() -> None:
    served = Served()
    api = EmbeddingsApi(cast(Any, served))
    _, request = visited("a")
    request.state.visit.keep(served.work.answers.texts, MOST)
    with pytest.raises(TryLater, match="bytes wait"):
        await api.vectors(request.state.visit, EmbeddingsRequest(input=["a"] * 9))
    served.work.close()
