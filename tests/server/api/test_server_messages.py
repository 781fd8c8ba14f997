"""``/v1/messages`` against a live server: bodies and events as Anthropic's client has them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.xdist_group("fake_server")

WEATHER = {"name": "weather", "description": "tells it", "input_schema": {"type": "object"}}
CALL = '<tool_call>~{"name": "weather", "arguments": {"city": "Bern"}}~</tool_call>'
ANSWERS = {
    "text": "SAY Good day to you.",
    "nothing": "SAY ",
    "reasoning": "SAY <think>~They greet.~</think>~~Good day.",
    "only reasoning": "SAY <think>~They greet.",
    "call": f"SAY {CALL}",
    "all": f"SAY <think>~They ask.~</think>~~Let me see.~{CALL}~{CALL}",
    "characters": "SAY Grüße aus Zürich 🏔 und mehr",
}
PIXEL = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
HEADERS = {"anthropic-version": "2023-06-01", "x-api-key": "unused"}


@pytest.fixture(scope="module")
def scripted(scripted_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted_url, headers=HEADERS, timeout=60) as client:
        yield client


def body_of(text: str = "SAY hi", **more: Any) -> dict[str, Any]:
    asked = {"model": "fake", "max_tokens": 400, "messages": [{"role": "user", "content": text}]}
    return asked | more


def answered(client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    reply = client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()
    return message


def events_of(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = client.post("/v1/messages", json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *written, rest = reply.text.split("\n\n")
    assert rest == "" and "[DONE]" not in reply.text
    events = []
    for one in written:
        name, data = one.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def grown(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of events, each checked to come where it may."""
    first, *between, last, stop = events
    message: dict[str, Any]
    assert first["type"] == "message_start" and stop == {"type": "message_stop"}
    message = first["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    index, kind, arguments = -1, None, ""
    for event in between:
        match event["type"]:
            case "content_block_start":
                index, arguments = index + 1, ""
                assert kind is None
                kind = event["content_block"]["type"]
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, (delta, *told) = message["content"][index], event["delta"].values()
                field = delta.removesuffix("_delta")
                assert (kind, field) in {
                    *(("text", "text"), ("thinking", "thinking"), ("thinking", "signature")),
                    ("tool_use", "input_json"),
                }
                arguments += told[0] if field == "input_json" else ""
                if field != "input_json":
                    block[field] += told[0]
            case "content_block_stop":
                if kind == "tool_use":
                    message["content"][index]["input"] = json.loads(arguments or "{}")
                kind = None
        assert event["index"] == index
    assert kind is None and last["type"] == "message_delta"
    whole: dict[str, Any] = message | last["delta"]
    return whole | {"usage": message["usage"] | last["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs from one request to the next."""
    content = [{k: v for k, v in one.items() if k != "id"} for one in message["content"]]
    told = ("id", "usage")
    return {k: v for k, v in message.items() if k not in told} | {"content": content}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_ends_with_what_a_whole_message_is(scripted: httpx.Client, name: str) -> None:
    body = body_of(ANSWERS[name], tools=[WEATHER])
    whole = answered(scripted, body)
    streamed = grown(events_of(scripted, body))
    assert without_ids(streamed) == without_ids(whole)
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "fake")
    assert whole["id"].startswith("msg")
    assert whole["usage"]["output_tokens"] == streamed["usage"]["output_tokens"] > 0


def test_the_blocks_of_an_answer(scripted: httpx.Client) -> None:
    message = answered(scripted, body_of(ANSWERS["all"], tools=[WEATHER]))
    thinking, text, *calls = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "They ask.")
    assert thinking["signature"] and text == {
        "type": "text",
        "text": "Let me see.",
        "citations": None,
    }
    for call in calls:
        assert (call["type"], call["name"]) == ("tool_use", "weather")
        assert call["input"] == {"city": "Bern"} and call["id"].startswith("toolu_")
    assert len({call["id"] for call in calls}) == 2
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": len("They ask.")}


def test_thinking_that_is_omitted_keeps_its_signature(scripted: httpx.Client) -> None:
    for kind in ({"type": "adaptive"}, {"type": "disabled"}):
        thinking = kind | {"display": "omitted"}
        body = body_of(ANSWERS["reasoning"], thinking=thinking)
        shown = answered(scripted, body | {"thinking": kind})["content"][0]
        hidden = answered(scripted, body)["content"][0]
        assert shown["thinking"] == "They greet." and hidden["thinking"] == ""
        assert hidden["signature"] == shown["signature"] != ""
        assert grown(events_of(scripted, body))["content"][0] == hidden


@pytest.mark.parametrize(
    ("text", "more", "reason", "sequence"),
    [
        ("SAY good day", {}, "end_turn", None),
        ("SAY good day", {"max_tokens": 4}, "max_tokens", None),
        ("SAY good END day", {"stop_sequences": ["day", "END"]}, "stop_sequence", "END"),
        ("SAY good day", {"stop_sequences": ["nothing"]}, "end_turn", None),
        (ANSWERS["call"], {"tools": [WEATHER]}, "tool_use", None),
        (ANSWERS["call"], {"tools": [WEATHER], "max_tokens": 40}, "max_tokens", None),
        (ANSWERS["call"], {"tools": [WEATHER], "tool_choice": {"type": "none"}}, "end_turn", None),
    ],
)  # fmt: skip
def test_why_an_answer_ended(
    scripted: httpx.Client, text: str, more: dict[str, Any], reason: str, sequence: str | None
) -> None:
    body = body_of(text, **more)
    for message in (answered(scripted, body), grown(events_of(scripted, body))):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        assert "END" not in json.dumps(message["content"])


@pytest.mark.parametrize("most", [1, 8, 30, 60, 75])
def test_a_call_that_is_cut_off_has_what_came_of_its_input(
    scripted: httpx.Client, most: int
) -> None:
    body = body_of(ANSWERS["call"], tools=[WEATHER], max_tokens=most)
    message = answered(scripted, body)
    assert message["stop_reason"] == "max_tokens" and message["usage"]["output_tokens"] == most
    for call in message["content"]:
        assert call["type"] == "text" or call["input"] in ({}, {"city": "Bern"})


@pytest.mark.parametrize(
    ("choice", "script"),
    [
        ({"type": "any"}, '[{"name": "weather", "parameters": {"city": "Bern"}}]'),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            '[{"name": "weather", "parameters": {"city": "Bern"}}]',
        ),
        ({"type": "tool", "name": "weather"}, '{"city": "Bern"}'),
    ],
)
def test_a_call_that_is_forced(scripted: httpx.Client, choice: dict[str, Any], script: str) -> None:
    body = body_of(f"SAY <think>~hm~</think>~{script}", tools=[WEATHER], tool_choice=choice)
    message = answered(scripted, body)
    assert [one["type"] for one in message["content"]] == ["thinking", "tool_use"]
    assert message["content"][1]["input"] == {"city": "Bern"}
    assert message["stop_reason"] == "tool_use"


def test_what_an_answer_had_is_sent_back_as_it_came(scripted: httpx.Client) -> None:
    body = body_of(ANSWERS["all"], tools=[WEATHER])
    first = answered(scripted, body)
    calls = [one["id"] for one in first["content"] if one["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0], "content": "sunny"},
        {"type": "tool_result", "tool_use_id": calls[1], "is_error": True,
         "content": [{"type": "text", "text": "no", "cache_control": {"type": "ephemeral"}}]},
        {"type": "text", "text": "SAY It is warm."},
    ]  # fmt: skip
    answer = {"role": "assistant", "content": first["content"]}
    turns = [*body["messages"], answer, {"role": "user", "content": results}]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    message = answered(scripted, body | {"messages": turns, "system": system})
    assert [one["text"] for one in message["content"]] == ["It is warm."]
    lines = f"tool: weather\nsystem: Be brief.\nuser: {ANSWERS['all']}\n"
    lines += "assistant: Let me see.\ntool: sunny\ntool: Error: no\n"
    lines += "user: SAY It is warm.\nassistant: "
    assert message["usage"]["cache_creation_input_tokens"] == len(lines) - 1
    counted = scripted.post(
        "/v1/messages/count_tokens",
        json={"model": "fake", "messages": turns, "system": system, "tools": [WEATHER]},
    )
    assert counted.json() == {"input_tokens": len(lines)}


def test_tokens_of_the_prompt_are_counted_once(scripted: httpx.Client) -> None:
    """Anthropic's input tokens are those that no cache had."""
    body = body_of("SAY seen only once before")
    size = len("user: SAY seen only once before\nassistant: ")
    for cached in (0, size - 1):
        usage = answered(scripted, body)["usage"]
        told = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(usage[name] for name in told) == size
        assert usage["cache_read_input_tokens"] == cached
        assert usage["cache_creation_input_tokens"] == size - 1 - cached
    begun = events_of(scripted, body)[0]["message"]["usage"]
    assert (begun["input_tokens"], begun["output_tokens"]) == (size, 0)


def test_the_beginning_of_an_answer_is_gone_on_with(scripted: httpx.Client) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "SAY {"}]
    asked = {"model": "fake", "messages": turns}
    counted = scripted.post("/v1/messages/count_tokens", json=asked).json()
    assert counted == {"input_tokens": len("user: hi\nassistant: SAY {")}
    told = scripted.post("/v1/messages", json=asked | {"max_tokens": 5}).json()
    [block] = told["content"]
    assert (block["type"], block["text"]) == ("text", "{")


def test_prompts_of_any_length_are_counted(scripted: httpx.Client) -> None:
    asked = {"model": "fake", "messages": [{"role": "user", "content": "x" * 9000}]}
    reply = scripted.post("/v1/messages/count_tokens", json=asked)
    assert reply.json() == {"input_tokens": len("user: \nassistant: ") + 9000}
    tools = asked | {"tools": [WEATHER], "tool_choice": {"type": "none"}}
    assert scripted.post("/v1/messages/count_tokens", json=tools).json() == reply.json()


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"thinking": {"type": "adaptive"}}, "enable_thinking=True\nthinking=True\n"),
        ({"thinking": {"type": "disabled"}}, "enable_thinking=False\nthinking=False\n"),
        ({"output_config": {"effort": "max"}}, "reasoning_effort=max\n"),
        ({"chat_template_kwargs": {"a": 1}}, "a=1\n"),
    ],
)  # fmt: skip
def test_what_the_template_is_told(
    scripted: httpx.Client, fields: dict[str, Any], line: str
) -> None:
    counts = [
        scripted.post("/v1/messages/count_tokens", json=asked).json()["input_tokens"]
        for asked in ({"model": "fake", "messages": body_of()["messages"]} | more
                      for more in ({}, fields))
    ]  # fmt: skip
    assert counts[1] - counts[0] == len(line)


def test_what_only_accompanies_a_request_is_taken(scripted: httpx.Client) -> None:
    message = answered(
        scripted,
        body_of(
            metadata={"user_id": "me"}, service_tier="auto", temperature=0, top_p=0.5, top_k=4,
            cache_control={"type": "ephemeral"}, context_management={"edits": []}, speed="fast",
            diagnostics={"previous_message_id": None}, inference_geo="eu", mcp_servers=[],
            container=None, seed=1, min_p=0.1, cache_salt="s", prompt_cache_key="k",
            priority=1, deadline_seconds=60, will_return=False, stream=False,
            tools=[WEATHER | {"type": "custom", "cache_control": {"type": "ephemeral"}}],
            output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        ),
    )  # fmt: skip
    assert message["content"][0]["text"] == "hi"


def test_a_model_without_reasoning_refuses_a_budget_by_name(server_url: str) -> None:
    """And one whose tags are no single tokens; a budget of -1 is none."""
    chat = {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    for path, fields, named in (
        ("/v1/chat/completions", {"thinking_token_budget": 5}, "thinking_token_budget=5: "),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 5}},
         "thinking.budget_tokens=5: "),
    ):  # fmt: skip
        reply = httpx.post(server_url + path, json=chat | fields)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].startswith(named + "needs a model that marks")
    for budget in (-1, None):
        asked = chat | {"thinking_token_budget": budget, "reasoning_effort": "low"}
        assert httpx.post(f"{server_url}/v1/chat/completions", json=asked).status_code == 200


IMAGE = {"type": "image", "source": PIXEL}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "hi"},
                       {"role": "assistant", "content": [USE]}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content"),
        ({"system": "a", "messages": [{"role": "user", "content": "b"},
                                      {"role": "user", "content": [IMAGE]}]},
         "messages[0].content"),
        ({"messages": [{"role": "user", "content": [RESULT | {"content": [IMAGE]}]}]},
         "messages[0].content"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [USE] * 129},
                       {"role": "user", "content": "hi"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [RESULT] * 1024}] * 5}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
        ({"tools": [{"name": "f g"}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER | {"cache_control": {"type": "eternal"}}]}, "tools[0].cache_control"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "time"}, "tools": [WEATHER]},
         "tool_choice.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"cache_control": {"type": "ephemeral", "ttl": "1y"}}, "cache_control"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_served_is_refused_by_name(
    scripted: httpx.Client, fields: dict[str, Any], named: str, stream: bool
) -> None:
    asked = {k: v for k, v in (body_of() | fields).items() if v is not None}
    reply = scripted.post("/v1/messages", json=asked | {"stream": stream})
    assert reply.status_code == 400
    told = reply.json()
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
    assert told["error"]["message"].startswith(named)
    assert set(told) == {"type", "error"} and set(told["error"]) == {"type", "message"}


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/messages", body_of(model="claude"), 404, "not_found_error"),
        ("/v1/messages/count_tokens", {"model": "claude", "messages": [{"role": "user",
         "content": "a"}]}, 404, "not_found_error"),
        ("/v1/messages/batches", {}, 404, "not_found_error"),
        ("/v1/messages", [], 400, "invalid_request_error"),
        ("/v1/messages/count_tokens", {}, 400, "invalid_request_error"),
        ("/v1/messages", body_of("SAY a textBREAK"), 500, "api_error"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_shape(
    scripted: httpx.Client, path: str, body: object, status: int, kind: str
) -> None:
    reply = scripted.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)


def test_a_failure_behind_the_first_event_is_an_event(scripted: httpx.Client) -> None:
    events = events_of(scripted, body_of(f"SAY {'a long text ' * 20}BREAK"))
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert "cancelled" in events[-1]["error"]["message"]
