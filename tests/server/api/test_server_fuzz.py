"""Thousands of requests that nobody would write, against a live server over a fake engine.

Some are made by schemathesis from the server's own schema, right and wrong ones; others are good
requests in which a value was replaced by one from the edge of what JSON can say.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.depth import few, scaled

SCRIPTED = Path(__file__).parents[1] / "scripted_server.py"
PATIENCE_SECONDS = 60.0
"""A call that takes longer hangs."""
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
CASES = {
    "POST /v1/completions": 150,
    "POST /v1/chat/completions": 60,
    "POST /v1/responses": 80,
    "POST /v1/messages": 80,
    "POST /v1/messages/count_tokens": 40,
    "POST /v1/embeddings": 60,
    "POST /v1/score": 60,
    "POST /v1/rerank": 60,
    "POST /tokenize": 40,
    "POST /detokenize": 60,
    "GET /v1/models/{name}": 60,
    "GET /debug/pages/{instance}/{large_page}": 30,
}
"""Of each kind of data; routes without parameters are asked once."""
CHANGES = ("POST /cluster/scale", "POST /cluster/drain")
"""Routes that change the server."""
WITHOUT_BODY = ("POST /ping", "POST /reset_prefix_cache")
COSTLY = (
    *("POST /v1/chat/completions", "POST /v1/messages", "POST /v1/messages/count_tokens"),
    "POST /tokenize",
)
"""Routes for whose schemas schemathesis looks a second for each case."""
CLUSTER_CASES = 60
EDGE_CASES = 1600
LEAST_CASES, LEAST_ANSWERED = 700, 40
"""Of the schema's cases, and of those that are good requests; like all above, at depth one."""

USER = {"role": "user", "content": "SAY <think>~hm~</think>~~Good day."}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "tells it", "parameters": PARAMETERS, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
DIRECTIVE = {"start": 0, "end": 5, "priority": 9, "duration": 60, "covers_output": False}
RETAIN = {
    "action_id": "a", "action_type": "kv.retain", "action_version": "1.0",
    "payload": {"scope": "s", "directives": [DIRECTIVE]},
}  # fmt: skip
HINTS = {"protocol_version": "0.1", "message_id": "m", "actions": [RETAIN]}
SAMPLING = {
    "model": "fake", "stream": False, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1,
    "seed": 1, "stop": ["end"], "stop_token_ids": [5], "ignore_eos": False, "min_tokens": 0,
    "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0}, "cache_salt": "s", "prompt_cache_key": "k", "will_return": True,
    "user": "me", "metadata": {"a": "b"}, "service_tier": "auto",
    "stream_options": {"include_usage": True}, "bad_words": ["no"], "allowed_token_ids": [5, 6],
    "include_stop_str_in_output": True, "skip_special_tokens": False, "kv_hints": HINTS,
}  # fmt: skip
OPTIONS = {
    "num_predict": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 1,
    "stop": ["end"], "repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "num_ctx": 64, "num_gpu": 1,
}  # fmt: skip
SCHEMA = {"name": "form", "schema": {"type": "object"}, "strict": True}
GOOD: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {
        **SAMPLING, "prompt": ["SAY good", "SAY day"], "max_tokens": 4, "n": 2, "echo": True,
        "logprobs": 2, "best_of": 2, "use_beam_search": False, "length_penalty": 1.0,
        "early_stopping": False, "return_token_ids": True, "guided_choice": ["a", "b"],
        "prompt_logprobs": None, "suffix": "", "truncate_prompt_tokens": 5,
        "add_special_tokens": False, "spaces_between_special_tokens": True,
    },
    "/v1/chat/completions": {
        **SAMPLING, "max_tokens": 30, "n": 1, "tools": [{"type": "function", "function": FUNCTION}],
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "sunny"}]},
            USER,
        ],
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning_effort": "low",
        "chat_template_kwargs": {"a": 1}, "logprobs": True, "top_logprobs": 1,
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        "continue_final_message": True, "add_generation_prompt": False,
        "truncate_prompt_tokens": -1, "add_special_tokens": True,
    },
    "/v1/responses": {
        **SAMPLING, "max_output_tokens": 30, "tools": [{"type": "function", **FUNCTION}],
        "instructions": "be brief", "top_logprobs": 1, "include": ["message.output_text.logprobs"],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "sunny"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            USER,
        ],
        "tool_choice": {"type": "function", "name": "weather"}, "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_object"}}, "store": False, "truncation": "disabled",
    },
    "/v1/messages": {
        **{k: SAMPLING[k] for k in ("model", "stream", "temperature", "top_p", "top_k", "seed")},
        "max_tokens": 30, "stop_sequences": ["end"], "metadata": {"user_id": "me"},
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "weather", "description": "tells it", "input_schema": PARAMETERS}],
        "messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Bern"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "is_error": False,
                 "content": [{"type": "text", "text": "sunny"}]}]},
            USER,
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive", "display": "omitted"}, "service_tier": "auto",
        "output_config": {"effort": "low",
                          "format": {"type": "json_schema", "schema": SCHEMA["schema"]}},
    },
    "/v1/messages/count_tokens": {
        "model": "fake", "messages": [USER], "system": "be brief",
        "tools": [{"name": "weather", "input_schema": PARAMETERS}],
    },
    "/api/chat": {
        "model": "fake:latest", "stream": False, "think": True, "keep_alive": "5m",
        "tools": [{"type": "function", "function": FUNCTION}], "options": OPTIONS, "format": "json",
        "messages": [
            USER,
            {"role": "assistant", "thinking": "hm",
             "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bern"}}}]},
            {"role": "tool", "tool_name": "weather", "content": "sunny"},
            USER,
        ],
    },
    "/api/generate": {
        "model": "fake", "stream": False, "prompt": "SAY good", "system": "be brief", "raw": False,
        "think": "low", "options": OPTIONS, "format": PARAMETERS, "suffix": "", "images": [],
    },
    "/api/show": {"model": "fake"},
    "/api/pull": {"model": "fake", "stream": False},
    "/api/embed": {"model": "fake", "input": ["a"], "truncate": True, "dimensions": 4},
    "/api/embeddings": {"model": "fake", "prompt": "a"},
    "/tokenize": {
        "model": "fake", "messages": [USER], "tools": [{"type": "function", "function": FUNCTION}],
        "chat_template_kwargs": {"a": 1}, "add_generation_prompt": True, "return_token_strs": True,
    },
    "/detokenize": {"model": "fake", "tokens": [70, 71, 72]},
    "/v1/embeddings": {
        "model": "fake", "input": ["SAY good", "day"], "encoding_format": "base64", "dimensions": 4,
        "cache_salt": "s", "prompt_cache_key": "k", "priority": 1, "user": "me",
    },
    "/v1/score": {
        "model": "fake", "text_1": "SAY good", "text_2": ["day", "night"], "cache_salt": "s",
        "prompt_cache_key": "k", "priority": 1, "user": "me", "use_activation": True,
    },
    "/v1/rerank": {
        "model": "fake", "query": "SAY good", "documents": ["day", {"text": "night"}], "top_n": 1,
        "return_documents": True, "cache_salt": "s", "priority": 1,
    },
}  # fmt: skip
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Routes whose answers can be streamed, and have a length."""
EDGES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 128, 2**31, -(2**31), 2**63, 2**64, 10**400, -(10**30)),
    *(0.5, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("", " ", "\0", "a", "fake", "\ud800", "\udfff x", "🏔", "x" * 5000, "~" * 300, "{", "null"),
    *("\x02", "required", "json_schema", "text", "image_url", "function", "data:image/png;base64,"),
    *([], [[]], [None], [0], [-1], [""], [[0], "a"], ["a"] * 600, [1] * 5000, [[1]] * 200),
    *({}, {"": {}}, {"type": "function"}, {"type": "text", "text": "\ud800"}, {"$ref": "#"}),
    *({"type": "object", "properties": {"a": {"$ref": "#"}}}, {str(n): n for n in range(300)}),
)
"""Values that JSON can say, and Python can write as JSON."""


@dataclass
class Fuzzed:
    """A server under fuzz, and what it answered."""

    url: str
    statuses: dict[int, int] = field(default_factory=dict)

    def check(self, reply: Any, sent: object) -> None:
        """Whatever was asked, the answer is well formed and no failure."""
        status, kind = reply.status_code, content_type(reply)
        self.statuses[status] = self.statuses.get(status, 0) + 1
        told = str(sent)[:2000], reply.text[:500]
        assert status < 500, told
        if kind.startswith("text/event-stream"):
            lines = [line for line in reply.text.split("\n") if line.startswith("data: ")]
            for line in lines:
                assert line == "data: [DONE]" or isinstance(strictly(line[6:]), dict), told
            assert lines, told
        elif kind == "application/x-ndjson":
            assert reply.text.endswith("\n"), told
            assert all(isinstance(strictly(line), dict) for line in reply.text.splitlines()), told
        elif kind == "application/json":
            strictly(reply.text)
        if status >= 400:
            check_error(reply, told)


def content_type(reply: Any) -> str:
    found = reply.headers.get("content-type", "")
    return str(found[0] if isinstance(found, list) else found)


def strictly(text: str) -> Any:
    """JSON without the numbers that only Python knows."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def check_error(reply: Any, told: object) -> None:
    """OpenAI's shape, or Anthropic's and Ollama's below their paths, in one clear line."""
    assert content_type(reply) == "application/json", told
    body = reply.json()
    if httpx.URL(str(reply.request.url)).path.startswith("/api/"):
        assert set(body) == {"error"} and isinstance(body["error"], str), told
        body = {"error": {"param": None, "code": None, "type": "x", "message": body["error"]}}
    if "/v1/messages" in str(reply.request.url):
        assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
        body = {"error": {"param": None, "code": None, **body["error"]}}
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"], told
    assert isinstance(body["error"]["type"], str) and body["error"]["type"], told
    for name in ("param", "code"):
        assert body["error"][name] is None or isinstance(body["error"][name], str), told
    assert len(body["error"]["message"]) < 2000, told


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    """A server; it must be as idle and as clean behind all tests as before."""
    command = [sys.executable, str(SCRIPTED)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = Fuzzed(process.stdout.readline().strip())
        try:
            before = instances(server.url)
            yield server
            check_idle(server.url, before)
        finally:
            process.terminate()
            assert process.wait(timeout=PATIENCE_SECONDS) == 0


def instances(url: str) -> list[tuple[Any, ...]]:
    told = httpx.get(f"{url}/cluster", timeout=PATIENCE_SECONDS).json()["instances"]
    names = ("id", "pid", "state", "incarnation", "restarts")
    return [tuple(one[name] for name in names) for one in told]


def check_idle(url: str, before: list[tuple[Any, ...]]) -> None:
    """Nothing is left of any request, and no instance died or came."""
    audit = httpx.get(f"{url}/debug/audit", timeout=PATIENCE_SECONDS).json()
    assert audit["clean"], audit
    assert instances(url) == before
    cluster = httpx.get(f"{url}/cluster", timeout=PATIENCE_SECONDS).json()
    assert cluster["front"]["waiting"] == 0, cluster
    for one in cluster["instances"]:
        kept = ("in_flight", "outstanding_prompt_tokens", "outstanding_output_tokens")
        assert [one[name] for name in kept] == [0, 0, 0], one
    assert httpx.get(f"{url}/debug/memory", timeout=PATIENCE_SECONDS).status_code == 200
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE_SECONDS).text.splitlines()
    for name in ("kvell:num_requests_running", "kvell:num_requests_waiting"):
        values = [float(line.split()[-1]) for line in lines if line.startswith(name + "{")]
        assert values and sum(values) == 0.0, lines
    assert httpx.get(f"{url}/health", timeout=PATIENCE_SECONDS).status_code == 200


def fuzz_schema(server: Fuzzed, chosen: int, are_costly: bool) -> int:
    """Ask routes that change nothing what their schemas allow and what they do not.

    :return: the number of routes and kinds of data.
    """
    asked = 0
    for operation in operations(server.url):
        if operation.label in CHANGES or (operation.label in COSTLY) != are_costly:
            continue
        takes_body = operation.method == "post" and operation.label not in WITHOUT_BODY
        modes = [GenerationMode.POSITIVE] + [GenerationMode.NEGATIVE] * takes_body
        for mode in modes:
            ask_all(server, operation, mode, scaled(CASES.get(operation.label, 0)), chosen)
            asked += 1
    return asked


def operations(url: str) -> list[Any]:
    found: Any = schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()
    return [one.ok() for one in found]


def ask_all(server: Fuzzed, operation: Any, mode: GenerationMode, count: int, chosen: int) -> None:
    is_good = mode is GenerationMode.POSITIVE

    @seed(chosen)
    @settings(few(), max_examples=count, database=None)
    @given(operation.as_strategy(generation_mode=mode), st.integers(0, 2**32))
    def ask(case: Any, chance: int) -> None:
        if is_good and isinstance(case.body, dict):
            case.body = narrowed(case.body, operation, Random(chance))
        reply = case.call(timeout=PATIENCE_SECONDS)
        server.check(reply, case.body)
        case.validate_response(reply, checks=CHECKS)

    ask()


def narrowed(body: dict[str, Any], operation: Any, random: Random) -> dict[str, Any]:
    """A body with fewer fields, so that not every one has a field that is out of range."""
    path, share = operation.path, random.choice((0.0, 0.1, 0.3, 1.0))
    needed = {"prompt", "messages", "input", "tokens"}
    kept = {k: v for k, v in body.items() if k in needed or random.random() < share}
    if random.random() < 0.9 and path in GOOD:
        kept["model"] = "fake"
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        kept |= {limit: random.randrange(1, 40)} if path in GENERATING else {}
    return kept


def with_edges(body: Any, random: Random) -> Any:
    """A copy in which one value, however deep, is one of the edges, or a field is left out."""
    if not isinstance(body, dict | list) or not body or random.random() < 0.2:
        return random.choice(EDGES)
    place = random.choice(list(body) if isinstance(body, dict) else range(len(body)))
    copied = body.copy()
    if random.random() < 0.1:
        del copied[place]
    else:
        copied[place] = with_edges(body[place], random)
    return copied


def fuzz_edges(server: Fuzzed, count: int, chosen: int) -> None:
    """Ask what is good but for a few values."""
    random = Random(chosen)
    with httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS) as client:
        for _ in range(count):
            path = random.choice(list(GOOD))
            fields = GOOD[path]
            share = random.choice((0.2, 0.5, 1.0))
            body: Any = {k: v for k, v in fields.items() if random.random() < share}
            body |= {k: fields[k] for k in ("prompt", "messages", "input", "tokens") if k in fields}
            for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
                body = with_edges(body, random)
            if isinstance(body, dict) and path in GENERATING:
                body["stream"] = random.random() < 0.4
                limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
                body.setdefault(limit, 9)
            content = json.dumps(body, ensure_ascii=random.random() < 0.5)
            raw = content.encode(errors="surrogatepass")
            kind = random.choice(("application/json",) * 20 + ("text/plain", "x", "", "a/b;c=d"))
            reply = client.post(path, content=raw, headers={"content-type": kind})
            server.check(reply, content)


@pytest.mark.hypothesis
def test_what_the_schema_allows_and_forbids(fuzzed: Fuzzed) -> None:
    before = sum(fuzzed.statuses.values())
    assert fuzz_schema(fuzzed, 1, are_costly=False) >= 18
    assert sum(fuzzed.statuses.values()) - before >= scaled(LEAST_CASES)
    assert fuzzed.statuses[200] >= scaled(LEAST_ANSWERED)


@pytest.mark.long
def test_what_costly_schemas_allow_and_forbid(fuzzed: Fuzzed) -> None:
    assert fuzz_schema(fuzzed, 1, are_costly=True) == 2 * len(COSTLY)


@pytest.mark.hypothesis
def test_values_at_the_edge(fuzzed: Fuzzed) -> None:
    before = Counter(fuzzed.statuses)
    count = scaled(EDGE_CASES)
    fuzz_edges(fuzzed, count, 1)
    # Its own alone: the schema's cases have deadlines too, which are missed with 408.
    statuses = Counter(fuzzed.statuses) - before
    assert statuses.total() == count
    assert set(statuses) <= {200, 400, 404, 415}, statuses


def harmless(path: str, body: Any) -> Any:
    """A body of ``/cluster`` that can change nothing."""
    if isinstance(body, dict) and path == "/cluster/scale":
        counts = body.get("instances")
        if isinstance(counts, dict):
            return body | {"instances": {k: v for k, v in counts.items() if k != "mixed"}}
    if isinstance(body, dict) and str(body.get("id", "")).startswith("mixed"):
        return body | {"id": "nobody"}
    return body


@pytest.mark.hypothesis
@pytest.mark.parametrize("label", CHANGES)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_the_cluster_is_not_changed_by_chance(
    fuzzed: Fuzzed, label: str, mode: GenerationMode
) -> None:
    [operation] = [one for one in operations(fuzzed.url) if one.label == label]

    @seed(1)
    @settings(few(), max_examples=scaled(CLUSTER_CASES), database=None)
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        case.body = harmless(operation.path, case.body)
        reply = case.call(timeout=PATIENCE_SECONDS)
        fuzzed.check(reply, case.body)
        assert reply.status_code in (400, 404)

    before = instances(fuzzed.url)
    ask()
    assert instances(fuzzed.url) == before


@pytest.mark.parametrize("label", CHANGES)
def test_no_value_at_the_edge_changes_the_cluster(fuzzed: Fuzzed, label: str) -> None:
    before, harmful = instances(fuzzed.url), [{"instances": {"mixed": n}} for n in (1, 2)]
    with httpx.Client(base_url=fuzzed.url, timeout=PATIENCE_SECONDS) as client:
        for value in EDGES:
            for body in (
                {"instances": value},
                {"instances": {"mixed": value}},
                {"id": value},
                value,
            ):
                if body in harmful:
                    continue
                content = json.dumps(body).encode()
                headers = {"content-type": "application/json"}
                reply = client.post(label.split()[1], content=content, headers=headers)
                fuzzed.check(reply, body)
                assert reply.status_code in (400, 404)
    assert instances(fuzzed.url) == before


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "POST"])
def test_every_method_of_every_path(fuzzed: Fuzzed, method: str) -> None:
    paths = httpx.get(f"{fuzzed.url}/openapi.json").json()["paths"]
    assert len(paths) >= 15
    for path, served in [*paths.items(), ("/", {"get": None}), ("/nothing", {})]:
        place = (
            path.replace("{name}", "fake").replace("{instance}", "x").replace("{large_page}", "0")
        )
        reply = httpx.request(method, f"{fuzzed.url}{place}", timeout=PATIENCE_SECONDS)
        assert reply.status_code < 500
        if method.lower() in served or (method == "HEAD" and "get" in served):
            continue
        assert reply.status_code == (404 if not served else 405), (method, path)
        if method != "HEAD":
            check_error(reply, path)
        if reply.status_code == 405:
            allowed = {*served, "head"} if "get" in served else {*served}
            assert reply.headers["allow"].lower().split(", ") == sorted(allowed)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe{}", b"{}" * 2, b'{"prompt": "\xff"}',
        b'{"prompt": "a}', b'{"prompt": "\xed\xa0\x80"}', b'{"tokens": "\\\\\\ud800"}',
        b'{"prompt": "\\ud800"}', b'{"prompt": 1e999}', b'{"a":' * 100 + b"1" + b"}" * 100,
        b'{"prompt": "hi", "prompt": 5}', b'{"prompt": ' + b"9" * 6000 + b"}", b"\0" * 100,
        b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}", b'{"\\ud800": 1}',
        b'{"prompt": "a", "metadata": {"\\ud800": "\\udfff"}}',
        b'{"prompt": "a", "max_tokens": 1, "user": "\\ud800", "cache_salt": "\\ud800"}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", sorted(GOOD))
def test_bodies_that_are_no_request(fuzzed: Fuzzed, path: str, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    reply = httpx.post(
        f"{fuzzed.url}{path}", content=content, headers=headers, timeout=PATIENCE_SECONDS
    )
    fuzzed.check(reply, content)
    assert path == "/v1/completions" or reply.status_code == 400


ARGUMENTS = '{"city": "\\ud800"}'


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {"tools": [{}]}, "tools[0].function"),
        ("/tokenize", {"tools": [{"type": 5}]}, "tools[0].type"),
        ("/tokenize", {"tools": [{"type": "function"}]}, "tools[0].function"),
        *(
            (path, {"repetition_penalty": value}, "repetition_penalty")
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses")
            for value in (1e-320, 1e-39, 1e-7)
        ),
    ],
)  # fmt: skip
def test_what_once_broke_is_refused_by_name(
    fuzzed: Fuzzed, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = httpx.post(f"{fuzzed.url}{path}", json=GOOD[path] | fields, timeout=PATIENCE_SECONDS)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [
                {**CALL, "function": {"name": "f", "arguments": ARGUMENTS}}]}]},
        ),
        (
            "/v1/responses",
            {"input": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": ARGUMENTS}]},
        ),
    ],
)  # fmt: skip
def test_half_a_character_in_what_a_model_wrote_is_passed_on(
    fuzzed: Fuzzed, path: str, fields: dict[str, Any]
) -> None:
    reply = httpx.post(f"{fuzzed.url}{path}", json=GOOD[path] | fields, timeout=PATIENCE_SECONDS)
    assert reply.status_code == 200, reply.text
