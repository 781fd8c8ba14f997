"""Ollama's routes about models, and the options and log probabilities of its answers."""

import json
import re
from collections.abc import Iterator
from typing import Any, cast

import httpx
import ollama
import pytest

from kvell.engine.protocol.sampling_params import ALL_TOKENS
from kvell.engine.protocol.statistics import InstanceFacts, ModelWeights
from kvell.engine.sampling.model_defaults import NEUTRAL
from kvell.server.answers.named import parser_named
from kvell.server.api.bodies.ollama_models import description, loaded_entry, tag_entry
from kvell.server.api.http_errors import UnknownModel
from kvell.server.api.schemas.generation import CompletionRequest
from kvell.server.api.schemas.ollama.requests import (
    LAST_TOKENS,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from kvell.server.api.serving import ServerModel, human_number, is_size, served_name
from kvell.server.text.text_bounds import AnswerRoom, ContextLength
from kvell.testing.instance import POOL_BYTES, STORED, WEIGHTS_BYTES, ByteText

pytestmark = pytest.mark.xdist_group("fake_server")
COPILOT_WANTS = (0, 6, 4)
"""The oldest version of Ollama that VS Code's Copilot uses."""
MANAGEMENT = [
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("POST", "/api/blobs/sha256:00"),
]


@pytest.fixture(scope="module")
def client(scripted_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def official(scripted_url: str) -> ollama.Client:
    return ollama.Client(scripted_url)


def server_model(text: ByteText | None = None, tool: str = "hermes") -> ServerModel:
    answers = parser_named(tool, "none")
    text = text or ByteText("m", chat_template="tools", takes_tools=True)
    return ServerModel(text, cast(Any, None), "", ContextLength(64), answers)


def instance(weights: ModelWeights, host: str = "", **memory: int) -> InstanceFacts:
    return InstanceFacts(1, 8, "m", 64, 1000, memory=memory, weights={"": weights}, host=host)


def test_the_version_is_one_that_clients_take(client: httpx.Client) -> None:
    version = client.get("/api/version").json()["version"]
    numbers = tuple(map(int, version.split(".")))
    assert len(numbers) == 3 and numbers >= COPILOT_WANTS
    assert client.head("/api/version").status_code == client.head("/").status_code == 200


def test_lists_have_the_sizes_of_files_and_of_memory(official: ollama.Client) -> None:
    [model] = official.list().models
    details = model.details
    assert details is not None
    assert (model.model, model.size, model.digest) == ("fake:latest", STORED.size_bytes, "5" * 64)
    assert model.modified_at is not None
    assert model.modified_at.timestamp() == STORED.modified_unix_seconds
    assert (details.format, details.family, details.parameter_size) == (
        *("safetensors", "bytes"),
        "135M",
    )
    assert details.quantization_level == "Q8_0"
    [loaded] = official.ps().models
    assert (loaded.size, loaded.size_vram) == (POOL_BYTES + WEIGHTS_BYTES, 0)
    assert loaded.expires_at is not None and loaded.expires_at.year > 2300
    assert loaded.context_length == 4096


def test_memory_counts_each_pool_and_shared_weights_once() -> None:
    cpu, gpu = ModelWeights(500, "float32", "cpu"), ModelWeights(500, "bfloat16", "cuda")
    sizes = {
        "one": [instance(cpu, activation_reserve_bytes=30)],
        "two share": [instance(cpu), instance(cpu)],
        "two hosts": [instance(cpu), instance(cpu, "other")],
        "two GPUs": [instance(gpu), instance(gpu)],
        "shared pool": [instance(cpu, shared_bytes=4000, activation_reserve_bytes=30)],
    }
    entries = {
        name: loaded_entry("m", server_model(), instances, 0) for name, instances in sizes.items()
    }
    assert {name: (entry["size"], entry["size_vram"]) for name, entry in entries.items()} == {
        "one": (1530, 0),
        "two share": (2500, 0),
        "two hosts": (3000, 0),
        "two GPUs": (3000, 3000),
        "shared pool": (4500, 0),
    }


def test_a_model_without_files_has_the_size_of_its_weights() -> None:
    text = ByteText("m")
    text.stored = type(STORED)()
    entry = tag_entry("m", server_model(text), instance(ModelWeights(500, "int4", "cpu")), 7.0)
    assert (entry["size"], entry["modified_at"]) == (500, "1970-01-01T00:00:07Z")
    assert (entry["details"]["parameter_size"], entry["details"]["quantization_level"]) == (
        *("", "Q4_1"),
    )


@pytest.mark.parametrize(
    ("text", "tool", "has_tools"),
    [
        (ByteText("m", "tools", takes_tools=True), "hermes", True),
        (ByteText("m", "tools", takes_tools=True), "none", False),
        (ByteText("m", "tools", takes_tools=False), "hermes", False),
    ],
)
def test_a_model_has_tools_if_they_are_shown_and_calls_are_read(
    text: ByteText, tool: str, has_tools: bool
) -> None:
    facts = instance(ModelWeights(1, "float32", "cpu"))
    shown = description("m", server_model(text, tool), facts, 0)
    assert ("tools" in shown["capabilities"]) == has_tools
    assert shown["model_info"]["bytes.context_length"] == 64
    assert shown["model_info"]["bytes.block_count"] == 3
    assert shown["model_info"]["general.parameter_count"] == STORED.parameters


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("show", {}),
        ("pull", {"stream": False}),
        ("embed", {"input": "a"}),
        ("embeddings", {"prompt": "a"}),
        ("chat", {"stream": False, "messages": [{"role": "user", "content": "SAY Hi."}]}),
        ("generate", {"stream": False, "prompt": "SAY Hi."}),
    ],
)
def test_name_is_an_older_spelling_of_model(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    varying = {"created_at", "total_duration", "prompt_eval_duration", "eval_duration"}
    answers = []
    for names in ({"model": "fake"}, {"name": "fake"}, {"model": "", "name": "fake"}):
        reply = client.post(f"/api/{path}", json={**names, **body})
        assert reply.status_code == 200, reply.text
        answers.append({name: v for name, v in reply.json().items() if name not in varying})
    assert answers[0] == answers[1] == answers[2]
    unknown = client.post(f"/api/{path}", json={"name": "other", **body})
    assert unknown.status_code == 404
    assert unknown.json()["error"].startswith("model=other: is not served; use fake")
    nameless = client.post(f"/api/{path}", json=body)
    assert (nameless.status_code, nameless.json()) == (400, {"error": "model: Field required"})


def test_a_served_model_is_pulled_at_once(official: ollama.Client) -> None:
    assert official.pull("fake").status == "success"
    lines = list(official.pull("fake:latest", stream=True))
    assert [line.status for line in lines] == ["pulling manifest", "success"]
    for streams in (False, True):
        with pytest.raises(ollama.ResponseError, match=r"use fake .* kvell serve MODEL") as error:
            list(cast(Any, official.pull("llama3.2", stream=cast(Any, streams))))
        assert error.value.status_code == 404


@pytest.mark.parametrize(("method", "path"), MANAGEMENT)
def test_models_are_given_when_the_server_starts(
    client: httpx.Client, method: str, path: str
) -> None:
    reply = client.request(method, path, json={"model": "fake"})
    assert reply.status_code == 404
    expected = f"path={path}: is not served; models are given when the server starts: kvell serve"
    assert reply.json()["error"].startswith(expected)


@pytest.mark.parametrize(
    ("tag", "parameters", "expected"),
    [
        ("135m", 134_515_008, True),
        ("135M", 134_515_008, True),
        ("0.6b", 596_049_920, True),
        ("1.7b", 2_031_739_904, True),
        ("7b", 7_615_616_512, True),
        ("360m", 134_515_008, False),
        ("1.7b", 134_515_008, False),
        ("135m", 0, False),
        ("instruct", 134_515_008, False),
        ("", 134_515_008, False),
    ],
)
def test_a_tag_is_the_nominal_size(tag: str, parameters: int, expected: bool) -> None:
    assert is_size(tag, parameters) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("m", "m"),
        ("m:latest", "m"),
        ("m:135m", "m"),
        ("m:8b", "m:8b"),
        ("m:1.7b", "is not served: m has 135M parameters; use m"),
        ("m:instruct", "is not served: m has no such tag; use m"),
        ("other:latest", "is not served; use m, m:8b"),
        (":latest", "is not served; use m, m:8b"),
    ],
)
def test_names_may_have_tags(name: str, expected: str) -> None:
    names = ("m", "m:8b")
    parameters = lambda _: STORED.parameters  # noqa: E731
    if expected in names:
        assert served_name(name, names, parameters) == expected
        return
    with pytest.raises(UnknownModel, match=re.escape(f"model={name}: {expected}")):
        served_name(name, names, parameters)


@pytest.mark.parametrize(
    ("number", "text"),
    [(8_000_000_000, "8B"), (8_030_261_248, "8.0B"), (134_515_008, "134.52M"), (5_000, "5K")],
)
def test_numbers_of_parameters_are_written_as_ollama_does(number: int, text: str) -> None:
    assert human_number(number) == text


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
