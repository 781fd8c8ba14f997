"""Options and log probabilities of Ollama's answers, and texts before a suffix."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from kvell.engine.protocol.sampling_params import ALL_TOKENS
from kvell.engine.sampling.model_defaults import NEUTRAL
from kvell.server.api.schemas.generation import CompletionRequest
from kvell.server.api.schemas.ollama.requests import (
    LAST_TOKENS,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from kvell.server.text.text_bounds import AnswerRoom

pytestmark = pytest.mark.xdist_group("fake_server")
DEFAULTS: dict[str, Any] = {
    "num_keep": 4,
    "seed": -1,
    "num_predict": -1,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "temperature": 0.8,
    "repeat_penalty": 1.1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "num_ctx": 4096,
    "num_batch": 512,
    "num_gpu": -1,
    "main_gpu": 0,
    "use_mmap": True,
    "num_thread": 0,
    "mirostat": 0,
    "tfs_z": 1.0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "penalize_newline": True,
    "numa": False,
    "low_vram": False,
    "f16_kv": True,
    "vocab_only": False,
    "use_mlock": False,
}
"""The defaults of Ollama's options, which some clients send."""
HI = [{"role": "user", "content": "SAY Hi."}]
ROOM = AnswerRoom(100, 100)


@pytest.fixture(scope="module")
def client(scripted_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def official(scripted_url: str) -> ollama.Client:
    return ollama.Client(scripted_url)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"num_ctx": 1 << 30},
        {"num_ctx": 0},
        {"num_ctx": -1},
        {"num_predict": 0},
        {"num_predict": -2},
        {"repeat_last_n": 0},
        {"repeat_last_n": -1},
        {"num_gpu": 99, "num_thread": 16, "use_mmap": False},
    ],
)
def test_ollamas_defaults_and_their_special_values_are_taken(
    official: ollama.Client, changed: dict[str, Any]
) -> None:
    answer = official.chat("fake", HI, options={**DEFAULTS, **changed})
    assert (answer.message.content, answer.done_reason) == ("Hi.", "stop")


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_truncate_and_shift_are_taken_in_both_values(client: httpx.Client, path: str) -> None:
    body = {"model": "fake", "stream": False, "messages": HI} | {"prompt": "SAY Hi."}
    del body["prompt" if path == "chat" else "messages"]
    for value in (True, False):
        reply = client.post(f"/api/{path}", json={**body, "truncate": value, "shift": value})
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({}, ALL_TOKENS),
        ({"repeat_penalty": 1.1}, LAST_TOKENS),
        ({"presence_penalty": 0.5}, LAST_TOKENS),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, ALL_TOKENS),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, 0),
        ({"repeat_last_n": 7}, 7),
    ],
)
def test_penalties_look_at_as_many_tokens_as_ollamas(options: Any, window: int) -> None:
    body = {"model": "m", "options": options}
    chat = OllamaChatRequest.model_validate({**body, "messages": HI}).chat()
    text = OllamaGenerateRequest.model_validate({**body, "prompt": "a", "raw": True}).completion()
    for request in (chat, text):
        assert request.sampling(ROOM, NEUTRAL).repeat_last_n == window


def lines_of(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = client.post(f"/api/{path}", json={"model": "fake", **body})
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("chat", {"messages": HI}),
        ("chat", {"messages": [{"role": "user", "content": "SAY <think>~Hm.~</think>~~ü"}]}),
        ("generate", {"prompt": "SAY Hi."}),
        ("generate", {"prompt": "SAY Hi.", "raw": True}),
    ],
)
def test_log_probabilities_of_lines_are_those_of_the_whole_answer(
    client: httpx.Client, path: str, prompt: dict[str, Any]
) -> None:
    asked = {**prompt, "logprobs": True, "top_logprobs": 1}
    [whole] = lines_of(client, path, **asked, stream=False)
    lines = lines_of(client, path, **asked)
    tokens = [token for line in lines for token in line.get("logprobs", [])]
    assert tokens == whole["logprobs"]
    assert len(tokens) == whole["eval_count"]
    assert tokens[0].keys() == {"token", "logprob", "bytes", "top_logprobs"}
    assert [len(token["top_logprobs"]) for token in tokens] == [1] * len(tokens)
    assert all("logprobs" not in line for line in lines_of(client, path, **prompt))


def test_top_logprobs_imply_logprobs(official: ollama.Client) -> None:
    answer = official.generate("fake", "SAY Hi.", top_logprobs=1)
    assert answer.logprobs is not None
    assert [token.token for token in answer.logprobs][:3] == ["H", "i", "."]


def test_the_answer_before_a_suffix_ends_at_a_mark(
    official: ollama.Client, client: httpx.Client
) -> None:
    """The model's marks are ``<|>``, and it says what follows SAY: the mark, and the suffix."""
    answer = official.generate("fake", "SAY Hi.", suffix=" there")
    assert (answer.response, answer.done_reason) == ("Hi.", "stop")
    assert answer.prompt_eval_count == len("<SAY Hi.| there>")
    body = {"model": "fake", "prompt": "SAY Hi.", "suffix": " there", "max_tokens": 20}
    [choice] = client.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hi.", "stop")


@pytest.mark.parametrize("field", ["echo", "truncate_prompt_tokens"])
def test_a_suffix_needs_the_whole_prompt(client: httpx.Client, field: str) -> None:
    body = {"model": "fake", "prompt": "a", "suffix": "b", field: True if field == "echo" else 5}
    reply = client.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert CompletionRequest.model_validate({**body, "suffix": ""}).checked_suffix() == ""
