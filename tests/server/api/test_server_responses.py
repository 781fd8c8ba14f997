"""``/v1/responses`` with OpenAI's own client, against live servers over fake engines."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvell.testing.instance import ByteText, fake_token

pytestmark = pytest.mark.xdist_group("fake_server")

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
ODD = {"type": "object", "properties": {"a": {"type": "string", "format": "path"}}}
CALL = '<tool_call>~{"name": "weather", "arguments": {"city": "Bern"}}~</tool_call>'
ANSWERS = {
    "text": "SAY Good day to you.",
    "nothing": "SAY <tool",
    "reasoning": "SAY <think>~They greet.~</think>~~Good day.",
    "only reasoning": "SAY <think>~They greet.",
    "call": f"SAY {CALL}",
    "all": f"SAY <think>~They ask.~</think>~~Let me see.~{CALL}~{CALL}",
    "characters": "SAY Grüße aus Zürich 🏔 und mehr",
}


@pytest.fixture(scope="module")
def scripted(scripted_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def said(prompt: str, count: int) -> str:
    ids = ByteText().encode(prompt).astype("<i4").tobytes()
    return "".join(chr(fake_token(ids, index)) for index in range(count))


def events_of(client: openai.OpenAI, **asked: Any) -> list[Any]:
    return list(client.responses.create(**asked, stream=True))


def without_ids(response: Response) -> dict[str, Any]:
    """A response without what differs from one request to the next."""
    plain: dict[str, Any] = response.model_dump()
    plain["usage"]["input_tokens_details"] = None
    for one in [plain, *plain["output"]]:
        for name in ("id", "call_id", "created_at"):
            one.pop(name, None)
    return plain


def check_stream(events: list[Any]) -> Response:
    """Check what holds for every stream; return its response."""
    for event in events:
        EVENTS.validate_python(event.model_dump(by_alias=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    last: Response = events[-1].response
    assert kinds[-1] == f"response.{last.status}"
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    assert kinds.count("response.output_item.added") == len(last.output)
    for place, item in enumerate(last.output):
        check_item(place, item, [one for one in events if place_of(one) == place])
    return last


def place_of(event: Any) -> int | None:
    place: int | None = getattr(event, "output_index", None)
    return place


def check_item(place: int, item: Any, events: list[Any]) -> None:
    """The events of one item lie together, and say what it is."""
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[0] == "output_item.added" and kinds[-1] == "output_item.done"
    assert events[0].item.status == "in_progress" and events[0].item.id == item.id
    assert events[-1].item == item and item.status in ("completed", "incomplete")
    assert {getattr(event, "item_id", item.id) for event in events} == {item.id}
    deltas = [event for event in events if event.type.endswith(".delta")]
    text = "".join(event.delta for event in deltas)
    if item.type == "function_call":
        assert set(kinds[1:-2]) == {"function_call_arguments.delta"}
        assert kinds[-2] == "function_call_arguments.done"
        assert text == item.arguments == events[-2].arguments
        assert events[0].item.name == item.name and events[0].item.arguments == ""
        return
    name = {"message": "output_text", "reasoning": "reasoning_text"}[item.type]
    assert kinds[1] == "content_part.added" and kinds[-2] == "content_part.done"
    assert kinds[-3] == f"{name}.done" and set(kinds[2:-3]) <= {f"{name}.delta"}
    [part] = item.content
    assert events[1].part.text == "" and events[-2].part.model_dump() == part.model_dump()
    assert text == part.text == events[-3].text
    if item.type == "message":
        told = [one.model_dump() for event in deltas for one in event.logprobs]
        whole = [
            {k: v for k, v in one.model_dump().items() if k in told[0]} for one in part.logprobs
        ]
        assert [one["token"] for one in told] == [one["token"] for one in whole]


def test_a_text_is_answered(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="fake", input="hi", max_output_tokens=20)
    assert reply.output_text == said("user: hi\nassistant: ", 20)
    assert (reply.object, reply.status, reply.model) == ("response", "incomplete", "fake")
    assert reply.incomplete_details and reply.incomplete_details.reason == "max_output_tokens"
    assert reply.id.startswith("resp") and reply.error is None
    [item] = reply.output
    assert item.type == "message" and item.status == "incomplete" and item.role == "assistant"
    assert reply.usage is not None
    counted = reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens
    assert counted == (20, 20, 40) and reply.usage.output_tokens_details.reasoning_tokens == 0


def test_it_says_what_chat_says(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="fake", instructions="be brief", input=[{"role": "user", "content": "hi"}],
        max_output_tokens=9, temperature=0,
    )  # fmt: skip
    chat = client.chat.completions.create(
        model="fake", max_tokens=9, temperature=0,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    )  # fmt: skip
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage and chat.usage
    assert answer.usage.input_tokens == chat.usage.prompt_tokens


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    for cached in (0, len("user: seen once\nassistant: ") - 1):
        reply = client.responses.create(model="fake", input="seen once", max_output_tokens=1)
        assert reply.usage and reply.usage.input_tokens_details.cached_tokens == cached
        written = len("user: seen once\nassistant: ") - 1 - cached
        assert reply.usage.input_tokens_details.cache_write_tokens == written


def test_a_conversation_of_items(scripted: openai.OpenAI) -> None:
    """What an answer had is sent back as it came."""
    asked: Any = [{"role": "user", "content": [{"type": "input_text", "text": ANSWERS["all"]}]}]
    tools: Any = [WEATHER]
    first = scripted.responses.create(model="fake", input=asked, tools=tools)
    calls = [item for item in first.output if item.type == "function_call"]
    again = [*asked, *(item.model_dump() for item in first.output)]
    again += [
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"},
        {"type": "function_call_output", "call_id": calls[1].call_id,
         "output": [{"type": "input_text", "text": "warm"}]},
        {"type": "message", "role": "developer", "content": "SAY It is warm."},
    ]  # fmt: skip
    reply = scripted.responses.create(model="fake", input=again, tools=tools)
    assert reply.output_text == "It is warm." and reply.status == "completed"
    lines = "tool: weather\n" + f"user: {ANSWERS['all']}\n" + "assistant: Let me see.\n"
    lines += "tool: sunny\ntool: warm\nsystem: SAY It is warm.\nassistant: "
    assert reply.usage and reply.usage.input_tokens == len(lines)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_ends_with_what_a_whole_answer_is(
    scripted: openai.OpenAI, name: str, logprobs: bool
) -> None:
    asked: Any = {"model": "fake", "input": ANSWERS[name], "tools": [WEATHER]}
    if logprobs:
        asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    streamed = check_stream(events_of(scripted, **asked))
    whole = scripted.responses.create(**asked)
    assert without_ids(streamed) == without_ids(whole)
    assert whole.status == "completed"


def test_the_parts_of_an_answer(scripted: openai.OpenAI) -> None:
    tools: Any = [WEATHER]
    reply = scripted.responses.create(model="fake", input=ANSWERS["all"], tools=tools)
    kinds = [item.type for item in reply.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    thought, message, *calls = reply.output
    assert thought.type == "reasoning" and thought.content
    assert thought.content[0].text == "They ask."
    assert reply.output_text == "Let me see."
    assert message.type == "message" and message.status == "completed"
    for call in calls:
        assert call.type == "function_call" and call.call_id.startswith("call_")
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bern"})
    assert len({item.id for item in reply.output}) == 4
    assert reply.usage and reply.usage.output_tokens_details.reasoning_tokens == len("They ask.")


def test_an_answer_of_nothing_is_an_empty_message(scripted: openai.OpenAI) -> None:
    for stream in (False, True):
        asked: Any = {"model": "fake", "input": "SAY ", "tools": [WEATHER]}
        reply = (
            check_stream(events_of(scripted, **asked))
            if stream
            else scripted.responses.create(**asked)
        )
        assert reply.output_text == "" and [item.type for item in reply.output] == ["message"]


@pytest.mark.parametrize("name", ["text", "reasoning", "call", "characters"])
def test_an_answer_that_is_cut_off(scripted: openai.OpenAI, name: str) -> None:
    asked: Any = {"model": "fake", "input": ANSWERS[name], "tools": [WEATHER]}
    for most in (1, 8, 20, 60):
        streamed = check_stream(events_of(scripted, **asked, max_output_tokens=most))
        whole = scripted.responses.create(**asked, max_output_tokens=most)
        assert without_ids(streamed) == without_ids(whole)
        is_cut = whole.status == "incomplete"
        assert is_cut == (whole.incomplete_details is not None)
        assert [item.status for item in whole.output[-1:]] == [whole.status]
        assert {item.status for item in whole.output[:-1]} <= {"completed"}


@pytest.mark.parametrize("name", ["text", "reasoning", "all", "characters"])
def test_probabilities_are_those_of_the_text(scripted: openai.OpenAI, name: str) -> None:
    tools: Any = [WEATHER]
    reply = scripted.responses.create(
        model="fake", input=ANSWERS[name], tools=tools, top_logprobs=1,
        include=["message.output_text.logprobs"],
    )  # fmt: skip
    [message] = [item for item in reply.output if item.type == "message"]
    [part] = message.content
    assert part.type == "output_text" and part.logprobs
    told = bytes(byte for one in part.logprobs for byte in one.bytes)
    assert told.rstrip(b"\0").decode().strip("~\n") == part.text
    assert all(one.top_logprobs[0].token == one.token for one in part.logprobs)


def test_what_was_asked_is_told_again(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "name": "form", "schema": schema, "strict": True}
    tools: Any = [WEATHER]
    text: Any = {"format": form}
    reply = client.responses.create(
        model="fake", input="hi", instructions="be brief", max_output_tokens=3, temperature=0.5,
        top_p=0.9, tools=tools, tool_choice="auto", parallel_tool_calls=False, text=text,
        metadata={"a": "b"}, user="me", store=True, reasoning={"effort": "low"},
        truncation="disabled", prompt_cache_key="k", safety_identifier="s", service_tier="auto",
        extra_body={"seed": 3, "min_p": 0.1, "top_k": 5},
    )  # fmt: skip
    assert (reply.instructions, reply.max_output_tokens) == ("be brief", 3)
    assert (reply.temperature, reply.top_p, reply.tool_choice) == (0.5, 0.9, "auto")
    assert reply.metadata == {"a": "b"} and reply.user == "me" and not reply.parallel_tool_calls
    assert reply.model_dump()["store"] is False
    assert reply.text and reply.text.format and reply.text.format.type == "json_schema"
    assert reply.text.format.schema_ == schema and reply.text.format.name == "form"
    assert reply.reasoning and reply.reasoning.effort == "low"
    [tool] = reply.tools
    assert tool.type == "function" and (tool.name, tool.strict) == ("weather", True)
    assert (reply.truncation, reply.prompt_cache_key) == ("disabled", "k")


def test_defaults_are_told_too(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="fake", input="hi", max_output_tokens=1)
    assert (reply.temperature, reply.top_p, reply.top_logprobs) == (1.0, 1.0, 0)
    assert (reply.tools, reply.tool_choice, reply.parallel_tool_calls) == ([], "auto", True)
    assert reply.text and reply.text.format and reply.text.format.type == "text"
    assert (reply.metadata, reply.background, reply.previous_response_id) == ({}, False, None)


def test_efforts_reach_the_template(client: openai.OpenAI) -> None:
    told = []
    efforts: list[Any] = [None, {"effort": "high"}]
    for reasoning in efforts:
        reply = client.responses.create(
            model="fake", input="hi", max_output_tokens=1, reasoning=reasoning
        )
        assert reply.usage
        told.append(reply.usage.input_tokens)
    assert told[1] - told[0] == len("reasoning_effort=high\n")


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "function", "name": "f g"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "wizard"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "time"}},
            "tool_choice.name",
        ),
        (
            {"text": {"format": {"type": "json_schema", "strict": True, "schema": ODD}}},
            "text.format.schema.properties.a.format",
        ),
        (
            {"tools": [{**WEATHER, "parameters": ODD, "strict": True}], "tool_choice": "required"},
            "tools[0].parameters.properties.a.format",
        ),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input"),
        ({"input": [{"role": "wizard", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": ["message"]}]}, "input[0]"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}]
             * 129},
            "input",
        ),
        ({"input": "x" * 5000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 2, "include": []}, "top_logprobs"),
        (
            {"top_logprobs": 21, "include": ["message.output_text.logprobs"]},
            "top_logprobs",
        ),
        ({"include": "file_search_call.results"}, "include"),
        ({"truncation": "perhaps"}, "truncation"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"metadata": [1]}, "metadata"),
        ({"extra_body": {"messages": []}}, "messages"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_served_is_refused_by_name(
    client: openai.OpenAI, arguments: dict[str, Any], param: str, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "fake", "input": "hi", "stream": stream}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked | arguments)
    assert caught.value.param == param and param in caught.value.message
    assert caught.value.type == "invalid_request_error"


def test_an_unknown_model_and_an_unknown_path(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="gpt-9", input="hi")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_too_long_an_input_has_openais_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input="x" * 4096)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_instance_is_a_bad_request(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="can never fit"):
        client.responses.create(model="fake", input="\x02", stream=stream)


def test_a_failure_behind_the_first_event_is_an_event(scripted: openai.OpenAI) -> None:
    events = events_of(scripted, model="fake", input=f"SAY {'a long text ' * 20}BREAK")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = EVENTS.validate_python(events[-1].model_dump(by_alias=True))
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error and last.response.error.code == "server_error"
    assert "cancelled" in last.response.error.message
    assert any(event.type == "response.output_text.delta" for event in events)
    with pytest.raises(openai.InternalServerError):
        scripted.responses.create(model="fake", input="SAY a textBREAK")


def test_events_are_named(server_url: str) -> None:
    asked = {"model": "fake", "input": "hi", "max_output_tokens": 3, "stream": True}
    reply = httpx.post(f"{server_url}/v1/responses", json=asked)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = reply.text.split("\n\n")
    assert rest == "" and "[DONE]" not in reply.text
    for block in blocks:
        name, data = block.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"


def test_the_helper_of_the_client_follows_the_stream(scripted: openai.OpenAI) -> None:
    """``client.responses.stream`` keeps its own copy of the response and checks it."""
    tools: Any = [WEATHER]
    with scripted.responses.stream(model="fake", input=ANSWERS["all"], tools=tools) as stream:
        text = "".join(one.delta for one in stream if one.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Let me see."
    assert [item.type for item in final.output][2:] == ["function_call"] * 2
