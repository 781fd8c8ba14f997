"""``/v1/responses`` from ``kvell serve`` with a real model: formats, calls, streams."""

import json
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

pytestmark = pytest.mark.xdist_group("packaged_server")
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": name, "parameters": CITY, "strict": True}
    for name in ("weather", "time")
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTION = "What is the weather in Bern?"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2, 3))]
)
def test_a_schema_is_followed(client: openai.OpenAI, stream: bool, seed: int) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    asked: Any = {"model": "smollm2", "input": "Invent a person.", "text": text}
    asked |= {"max_output_tokens": 200, "extra_body": {"seed": seed}}
    if stream:
        events = list(client.responses.create(**asked, stream=True))
        answer = "".join(one.delta for one in events if one.type == "response.output_text.delta")
        assert events[-1].response.output_text == answer
        assert events[-1].type == "response.completed"
    else:
        response = client.responses.create(**asked)
        assert response.status == "completed"
        answer = response.output_text
    jsonschema.validate(json.loads(answer), PERSON)


def test_any_object(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="smollm2", input="Answer in JSON.", temperature=0, max_output_tokens=300,
        text={"format": {"type": "json_object"}},
    )  # fmt: skip
    assert response.output_text.lstrip().startswith("{")


EITHER = {"weather", "time"}
NAMED = {"type": "function", "name": "time"}


@pytest.mark.parametrize(
    ("choice", "names", "stream"),
    [
        ("required", EITHER, True),
        (NAMED, {"time"}, False),
        pytest.param("required", EITHER, False, marks=pytest.mark.long),
        pytest.param(NAMED, {"time"}, True, marks=pytest.mark.long),
    ],
)
def test_a_function_must_be_called(
    client: openai.OpenAI, choice: Any, names: set[str], stream: bool
) -> None:
    asked: Any = {"model": "smollm2", "input": QUESTION, "tools": TOOLS, "tool_choice": choice}
    asked |= {"max_output_tokens": 64, "temperature": 0, "parallel_tool_calls": False}
    if stream:
        events = list(client.responses.create(**asked, stream=True))
        for event in events:
            EVENTS.validate_python(event.model_dump(by_alias=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        response = events[-1].response
        pieces = [one for one in events if one.type == "response.function_call_arguments.delta"]
        assert "".join(one.delta for one in pieces) == response.output[-1].arguments
    else:
        response = client.responses.create(**asked)
    [call] = response.output
    assert call.type == "function_call" and call.name in names
    jsonschema.validate(json.loads(call.arguments), CITY)


def test_a_schema_that_cannot_be_followed_is_refused_by_name(client: openai.OpenAI) -> None:
    bad: Any = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}
    text: Any = {"format": {"type": "json_schema", "name": "bad", "schema": bad}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="smollm2", input="hi", text=text, stream=stream)
        assert caught.value.param == "text.format.schema"
