"""Ollama's API against a live server: what its own client reads, lines, loads and refusals."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from kvell.server.api.bodies.ollama_models import VERSION
from kvell.server.api.schemas.ollama.requests import OllamaChatRequest, OllamaGenerateRequest

pytestmark = pytest.mark.xdist_group("fake_server")

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>~{"name": "weather", "arguments": {"city": "Bern"}}~</tool_call>'
ANSWERS = {
    "text": "SAY Good day to you.",
    "nothing": "SAY ",
    "reasoning": "SAY <think>~They greet.~</think>~~Good day.",
    "call": f"SAY {CALL}",
    "all": f"SAY <think>~They ask.~</think>~~Let me see.~{CALL}~{CALL}",
}
HI = {"role": "user", "content": "SAY Hi."}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
VARYING = {"created_at", *DURATIONS}


@pytest.fixture(scope="module")
def client(scripted_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def official(scripted_url: str) -> ollama.Client:
    """Ollama's own client of a server that says what it is told."""
    return ollama.Client(scripted_url)


def lines_of(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = client.post(path, json={"model": "fake", **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text.splitlines()]


def whole(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = client.post(path, json={"model": "fake", "stream": False, **body})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def steady(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in VARYING}


def joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the lines of a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in lines:
        for name, value in line["message"].items():
            if name in ("content", "thinking"):
                message[name] = message.get(name, "") + value
            elif name == "tool_calls":
                message[name] = message.get(name, []) + value
    return message


@pytest.mark.parametrize("name", ANSWERS)
def test_lines_add_up_to_the_whole_answer(client: httpx.Client, name: str) -> None:
    body = {"messages": [{"role": "user", "content": ANSWERS[name]}], "tools": [WEATHER]}
    lines, answer = lines_of(client, "/api/chat", **body), whole(client, "/api/chat", **body)
    assert steady({**lines[-1], "message": joined(lines)}) == steady(answer)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (answer["done_reason"], answer["model"]) == ("stop", "fake")
    assert answer["eval_count"] > 0 < answer["prompt_eval_count"]
    assert all(isinstance(answer[each], int) and answer[each] >= 0 for each in DURATIONS)
    assert answer["total_duration"] >= answer["prompt_eval_duration"] > 0


def test_the_parts_of_an_answer(client: httpx.Client) -> None:
    asked = {"role": "user", "content": ANSWERS["all"]}
    message = whole(client, "/api/chat", messages=[asked], tools=[WEATHER])["message"]
    call = {"function": {"name": "weather", "arguments": {"city": "Bern"}}}
    assert message == {
        "role": "assistant",
        "content": "Let me see.",
        "thinking": "They ask.",
        "tool_calls": [call, call],
    }


def test_its_own_client_reads_chats_and_their_ends(official: ollama.Client) -> None:
    answer = official.chat("fake:latest", [HI], options={"temperature": 0, "num_ctx": 64})
    assert (answer.message.content, answer.done, answer.done_reason) == ("Hi.", True, "stop")
    assert answer.model == "fake:latest"
    pieces = list(official.chat("fake", [HI], stream=True, options={"num_predict": 2}))
    assert "".join(piece.message.content or "" for piece in pieces) == "Hi"
    assert (pieces[-1].done_reason, pieces[-1].eval_count) == ("length", 2)


def test_its_own_client_calls_tools_and_gives_their_results(official: ollama.Client) -> None:
    asked: list[Any] = [{"role": "user", "content": ANSWERS["call"]}]
    answer = official.chat("fake", asked, tools=[WEATHER])
    [call] = answer.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Bern"})
    asked += [answer.message, {"role": "tool", "tool_name": "weather", "content": "SAY Sun."}]
    assert official.chat("fake", asked, tools=[WEATHER]).message.content == "Sun."


@pytest.mark.parametrize("raw", [False, True])
def test_its_own_client_generates(official: ollama.Client, raw: bool) -> None:
    answer = official.generate("fake", "SAY <think>~They greet.~</think>~~Good day.", raw=raw)
    expected = ("<think>\nThey greet.\n</think>\n\nGood day.", None)
    assert (answer.response, answer.thinking) == (expected if raw else ("Good day.", "They greet."))
    pieces = list(official.generate("fake", "SAY Hi.", raw=raw, stream=True))
    assert "".join(piece.response or "" for piece in pieces) == "Hi."
    assert pieces[-1].done and (pieces[-1].prompt_eval_count or 0) > 0


def test_its_own_client_lists_and_describes(official: ollama.Client, client: httpx.Client) -> None:
    for listed in (official.list(), official.ps()):
        [model] = listed.models
        assert (model.model, len(model.digest or "")) == ("fake:latest", 64)
    shown = official.show("fake:latest")
    assert shown.capabilities == ["completion", "tools", "thinking", "insert", "embedding"]
    assert shown.template and shown.modified_at
    assert client.get("/api/version").json() == {"version": VERSION}


def test_a_request_without_a_prompt_says_that_the_model_is_loaded(client: httpx.Client) -> None:
    answer = whole(client, "/api/generate", keep_alive="5m")
    assert (answer["response"], answer["done"], answer["done_reason"]) == ("", True, "load")
    assert whole(client, "/api/chat", messages=[])["message"]["content"] == ""


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("generate", {"prompt": "a", "suffix": "b", "system": "x"}, "system=…: cannot be combined"),
        ("generate", {"prompt": "a", "top_logprobs": 21}, "top_logprobs: "),
        ("generate", {"prompt": "a", "template": "x"}, "template=x: is not served; use raw"),
        ("generate", {"prompt": "a", "context": [1]}, "context=…: is not served; send the"),
        ("generate", {"prompt": "a", "raw": True, "system": "x"}, "system=…: needs the model's"),
        ("generate", {"prompt": "a", "images": ["iVBOR"]}, "images=image_url: is not accepted"),
        ("generate", {"prompt": "a", "format": "xml"}, "format: "),
        ("generate", {"prompt": "a", "options": {"mirostat": 1}}, "options.mirostat=1: is not"),
        ("generate", {"prompt": "a", "options": {"repeat_last_n": -2}}, "options.repeat_last_n: "),
        ("chat", {"messages": [HI], "logprobs": False, "top_logprobs": 2}, "top_logprobs=2: needs"),
        ("generate", {"prompt": "a", "options": {"temperature": -1}}, "options.temperature=-1"),
        (
            "generate",
            {"prompt": "a", "options": {"repeat_penalty": 1e3}},
            "options.repeat_penalty=",
        ),
        ("chat", {"messages": [HI], "options": {"stop": ["a"] * 100}}, "options.stop="),
        ("chat", {"messages": [HI], "tools": [{"type": "x"}]}, "tools[0]"),
        ("chat", {"messages": [{"role": "bot", "content": ""}]}, "messages[0].role: "),
        ("chat", {"messages": "hi"}, "messages: "),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name_here(
    client: httpx.Client, path: str, body: dict[str, Any], text: str
) -> None:
    reply = client.post(f"/api/{path}", json={"model": "fake", **body})
    assert reply.status_code == 400, reply.text
    assert list(reply.json()) == ["error"]
    assert reply.json()["error"].startswith(text)


def test_an_unknown_model_and_a_failure_are_ollamas_errors(
    official: ollama.Client, client: httpx.Client
) -> None:
    with pytest.raises(ollama.ResponseError, match="model=gpt-4: is not served; use fake") as error:
        official.chat("gpt-4", [HI])
    assert error.value.status_code == 404
    *_, last = lines_of(client, "/api/generate", prompt="SAY Hi.BREAK")
    assert list(last) == ["error"]


def test_options_and_thinking_reach_the_chat(client: httpx.Client) -> None:
    options = {"stop": "day", "seed": 3, "top_k": 4, "num_gpu": 1, "colour": "red"}
    body = {"messages": [{"role": "user", "content": ANSWERS["text"]}], "think": "low"}
    answer = whole(client, "/api/chat", options=options, **body)
    assert (answer["message"]["content"], answer["done_reason"]) == ("Good ", "stop")


def test_images_are_data_urls_of_their_kind() -> None:
    files = [
        base64.b64encode(head).decode() for head in (b"\xff\xd8\xff\xe0", b"GIF89a", b"\x89PNG")
    ]
    body = OllamaGenerateRequest(model="m", prompt="What?", images=files)
    [message] = body.chat().messages
    kinds = [url.partition(";")[0] for url in message.images()]
    assert kinds == ["data:image/jpeg", "data:image/gif", "data:image/png"]
    assert message.plain()["content"][0] == {"type": "text", "text": "What?"}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("", (False, None)),
        ("json", (True, None)),
        ({"type": "integer"}, (False, '{"type":"integer"}')),
    ],
)
def test_a_format_is_a_constraint(form: Any, expected: tuple[bool, str | None]) -> None:
    body = {"model": "m", "messages": [HI], "format": form}
    constraint = OllamaChatRequest.model_validate(body).chat().constraint()
    given = (False, None) if constraint is None else (constraint.json_object, constraint.json)
    assert given == expected


@pytest.mark.parametrize(
    ("think", "is_on", "effort"), [(True, True, None), (False, False, None), ("high", True, "high")]
)
def test_thinking_is_a_variable_of_the_template(
    think: Any, is_on: bool, effort: str | None
) -> None:
    chat = OllamaGenerateRequest(model="m", prompt="a", system="b", think=think).chat()
    expected: dict[str, Any] = {"enable_thinking": is_on, "thinking": is_on}
    expected |= {"reasoning_effort": effort} if effort else {}
    assert chat.template_fields() == expected
    assert [message.role for message in chat.messages] == ["system", "user"]
