"""Several models behind one server: requests name theirs, and get its answer."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import openai
import pytest

from kvell.testing.instance import ByteText, fake_token

StartServer = Callable[..., AbstractContextManager[tuple[str, object]]]


@pytest.fixture(scope="module")
def url(start_server: StartServer) -> Iterator[str]:
    with start_server("-", "0", "--beside", "small", "--beside", "owner/third") as (url, _):
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def answer(text: str, count: int, key: str) -> str:
    ids = ByteText().encode(text).astype("<i4").tobytes() + key.encode()
    return "".join(chr(fake_token(ids, i)) for i in range(count))


def test_all_are_listed_with_their_lengths(client: openai.OpenAI) -> None:
    cards: list[Any] = client.models.list().data
    names = {card.id: card.max_model_len for card in cards}
    assert names == {"fake": 4096, "small": 2048, "owner/third": 2048}


@pytest.mark.parametrize(("model", "key"), [("fake", ""), ("small", "small"), ("owner/third",) * 2])
def test_each_answers_in_its_own_way(client: openai.OpenAI, model: str, key: str) -> None:
    reply = client.completions.create(model=model, prompt="hi", max_tokens=12)
    assert (reply.model, reply.choices[0].text) == (model, answer("hi", 12, key))
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=12
    )
    assert chat.choices[0].message.content == answer("user: hi\nassistant: ", 12, key)


@pytest.mark.parametrize("unnamed", [{}, {"model": None}])
def test_who_names_none_means_the_first(url: str, unnamed: dict[str, None]) -> None:
    body = unnamed | {"prompt": "hi", "max_tokens": 12}
    reply = httpx.post(f"{url}/v1/completions", json=body).json()
    assert (reply["model"], reply["choices"][0]["text"]) == ("fake", answer("hi", 12, ""))
    asked = unnamed | {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}
    chat = httpx.post(f"{url}/v1/chat/completions", json=asked).json()
    assert chat["model"] == "fake"
    assert chat["choices"][0]["message"]["content"] == answer("user: hi\nassistant: ", 12, "")


def test_each_has_its_own_length(client: openai.OpenAI) -> None:
    prompt = "x" * 3000
    assert client.completions.create(model="fake", prompt=prompt, max_tokens=1).choices
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        client.completions.create(model="small", prompt=prompt, max_tokens=1)


def test_another_name_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="use fake, small, owner/third") as told:
        client.completions.create(model="Small", prompt="hi")
    assert told.value.code == "model_not_found"


def test_metrics_are_of_all(url: str) -> None:
    assert 'model_name="fake,small,owner/third"' in httpx.get(f"{url}/metrics").text
