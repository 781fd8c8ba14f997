"""OpenAI's own client asks ``kvell serve`` for vectors of a real model."""

import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.llm.exactness import truth

pytestmark = pytest.mark.xdist_group("packaged_server")
INPUTS = [
    "The capital of France is Paris.",
    "Paris is the capital of France.",
    "A page holds sixteen tokens.",
    "x",
    "A page holds sixteen tokens of one layer group. " * 20,
]


def tokens_of(url: str, text: str) -> list[int]:
    told: list[int] = httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["tokens"]
    return told


def check(path: Path, told: Sequence[float], ids: Sequence[int]) -> None:
    vector, expected = torch.tensor(told), truth(path, ids)
    assert float(vector @ expected) >= 1 - 1e-5
    assert float((vector - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize(
    "encoding", ["float", "base64", pytest.param(None, marks=pytest.mark.long)]
)
def test_vectors_are_transformers_in_both_encodings(
    client: openai.OpenAI, url: str, shallow_path: Path, encoding: Any
) -> None:
    more = {} if encoding is None else {"encoding_format": encoding}
    reply = client.embeddings.create(model="smollm2", input=INPUTS, **more)
    ids = [tokens_of(url, text) for text in INPUTS]
    for one, prompt in zip(reply.data, ids, strict=True):
        told: Any = one.embedding
        if encoding == "base64":
            told = np.frombuffer(base64.b64decode(told), "<f4").tolist()
        check(shallow_path, told, prompt)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, ids))


def test_beside_answers_that_stay_as_they_are(client: openai.OpenAI, shallow_path: Path) -> None:
    prompt = list(range(200, 240))

    def answer(_: int) -> list[int]:
        reply = client.completions.create(
            model="smollm2", prompt=[prompt], max_tokens=24, temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        told: list[int] = reply.choices[0].token_ids  # type: ignore[attr-defined]
        return told

    alone = answer(0)
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(answer, n) for n in range(6)]
        vectors = [
            pool.submit(client.embeddings.create, model="smollm2", input=[prompt[: 9 + n]])
            for n in range(6)
        ]
        assert all(one.result() == alone for one in answers)
        for number, one in enumerate(vectors):
            check(shallow_path, one.result().data[0].embedding, prompt[: 9 + number])


def test_a_size_that_the_model_was_not_trained_for_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="is_matryoshka") as caught:
        client.embeddings.create(model="smollm2", input="a", dimensions=64)
    assert caught.value.param == "dimensions"
