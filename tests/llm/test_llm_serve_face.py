"""What an OpenAI client asks for beyond text, from ``kvell serve`` with a real model."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch
from transformers import AutoTokenizer

from kvell import SamplingParams
from tests.engine.sampling.random_schemas import random_schema
from tests.llm.teacher import model_at, smollm2

pytestmark = pytest.mark.xdist_group("packaged_server")
PROMPT = "The capital of France is"
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]


@pytest.fixture(scope="module")
def reference(shallow_path: Path) -> Any:
    return model_at(shallow_path)


@pytest.fixture(scope="module")
def tokenizer(shallow_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(shallow_path)


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.long)])
def test_random_schemas_are_obeyed(client: openai.OpenAI, count: int) -> None:
    schemas = [random_schema(1000 + index) for index in range(count)]

    def answer(index: int) -> Any:
        reply = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": f"Fill in form {index}."}],
            max_tokens=600,
            temperature=1.0 if index % 2 else 0.0,
            seed=index,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "form", "schema": schemas[index]},
            },
        )
        assert reply.choices[0].finish_reason == "stop"
        return json.loads(reply.choices[0].message.content or "")

    with ThreadPoolExecutor(16) as pool:
        for schema, value in zip(schemas, pool.map(answer, range(count)), strict=True):
            jsonschema.validate(value, schema)


def test_logprobs_of_chat_are_the_models(
    client: openai.OpenAI, reference: Any, tokenizer: Any
) -> None:
    reply = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True,
        top_logprobs=4, extra_body={"return_token_ids": True},
    )  # fmt: skip
    [choice] = reply.choices
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    output: list[int] = choice.token_ids  # type: ignore[attr-defined]
    ids = torch.tensor([[*prompt, *output]])
    truth = reference(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == len(output)
    for row, token, told in zip(truth, output, choice.logprobs.content, strict=True):
        assert abs(row[token].item() - told.logprob) < 1e-3
        likeliest = row.topk(4).values.tolist()
        assert [one.logprob for one in told.top_logprobs] == pytest.approx(likeliest, abs=1e-3)
        assert bytes(told.bytes or []).decode() == told.token == tokenizer.decode([token])


def test_an_echoed_prompt_is_scored(client: openai.OpenAI, reference: Any, tokenizer: Any) -> None:
    reply = client.completions.create(
        model="smollm2", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1
    )
    [choice] = reply.choices
    ids = tokenizer(PROMPT)["input_ids"]
    truth = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert choice.text == PROMPT and choice.logprobs is not None
    told: list[Any] = list(choice.logprobs.token_logprobs or [])
    assert told[0] is None and len(told) == len(ids)
    for position, token in enumerate(ids[1:], start=1):
        assert abs(truth[position - 1, token].item() - told[position]) < 1e-3
    assert "".join(choice.logprobs.tokens or []) == PROMPT


def test_characters_of_several_tokens_have_their_bytes_and_offsets(
    client: openai.OpenAI, tokenizer: Any
) -> None:
    prompt = "I 🙂 玻璃!"
    reply = client.completions.create(
        model="smollm2", prompt=prompt, max_tokens=4, temperature=0, echo=True, logprobs=2
    )
    [choice] = reply.choices
    assert choice.text.startswith(prompt) and choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    count = len(tokenizer(prompt)["input_ids"])
    assert len(tokens) == len(offsets) == count + 4 > len(prompt) + 4, "some are pieces"
    for place in range(count):
        ids = tokenizer(prompt)["input_ids"][:place]
        assert offsets[place] == len(tokenizer.decode(ids).rstrip("\ufffd"))
    pieces = [token for token in tokens[:count] if token.startswith("bytes:\\x")]
    assert pieces
    assert offsets[count] == len(prompt)
    for token, top in zip(tokens[1:], (choice.logprobs.top_logprobs or [])[1:], strict=True):
        assert token in top and 2 <= len(top) <= 3


def test_a_stream_tells_what_a_whole_answer_tells(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 9, "temperature": 0}
    asked |= {"logprobs": 2, "echo": True}
    whole = client.completions.create(**asked).choices[0]
    pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert whole.logprobs is not None
    assert "".join(piece.text for piece in pieces) == whole.text
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        told = [one for piece in pieces for one in getattr(piece.logprobs, name)]
        assert told == getattr(whole.logprobs, name)


@pytest.mark.parametrize("count", [12, pytest.param(32, marks=pytest.mark.long)])
def test_a_repetition_penalty_is_transformers(
    client: openai.OpenAI, reference: Any, tokenizer: Any, count: int
) -> None:
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    made = reference.generate(ids, do_sample=False, max_new_tokens=count, repetition_penalty=1.3)
    reply = client.completions.create(
        model="smollm2", prompt=PROMPT, max_tokens=count, temperature=0,
        extra_body={"repetition_penalty": 1.3, "return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    told: list[int] = reply.choices[0].token_ids  # type: ignore[attr-defined]
    expected = made[0, ids.shape[1] :].tolist()
    assert told[: len(expected)] == expected


def test_a_frequency_penalty_and_a_bias_do_what_they_say(
    client: openai.OpenAI, shallow_path: Path
) -> None:
    llm = smollm2(shallow_path)
    params = SamplingParams(temperature=0, max_tokens=24, frequency_penalty=2.0, ignore_eos=True)
    [free] = llm.generate(PROMPT, params)
    banned = free.token_ids[3]
    reply = client.completions.create(
        model="smollm2", prompt=PROMPT, max_tokens=24, temperature=0, frequency_penalty=2.0,
        logit_bias={str(banned): -100},
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    told: list[int] = reply.choices[0].token_ids  # type: ignore[attr-defined]
    assert banned not in told and len(set(told)) > len(told) * 2 / 3
    [expected] = llm.generate(PROMPT, replace(params, logit_bias={banned: -100.0}))
    assert told == expected.token_ids


@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({"guided_choice": ["Bern", "Basel"]}, lambda text: text in ("Bern", "Basel")),
        ({"guided_regex": "[0-9]{4}"}, lambda text: len(text) == 4 and text.isdigit()),
        ({"structured_outputs": {"json_object": True}}, lambda text: text.startswith("{")),
    ],
)
def test_vllms_names_of_formats(client: openai.OpenAI, fields: Any, matches: Any) -> None:
    reply = client.completions.create(
        model="smollm2", prompt=PROMPT, max_tokens=16, extra_body=fields, seed=1
    )
    assert matches(reply.choices[0].text)


EITHER = {"weather", "time"}
NAMED = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize(
    ("choice", "names", "stream"),
    [
        ("required", EITHER, True),
        (NAMED, {"time"}, False),
        pytest.param("required", EITHER, False, marks=pytest.mark.long),
        pytest.param(NAMED, {"time"}, True, marks=pytest.mark.long),
    ],
)
def test_tools_that_must_be_called(
    client: openai.OpenAI, choice: Any, names: set[str], stream: bool
) -> None:
    asked: Any = {"model": "smollm2", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    asked |= {"max_tokens": 64, "temperature": 0, "parallel_tool_calls": False}
    if stream:
        name, arguments = "", ""
        for chunk in client.chat.completions.create(**asked, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                name += (call.function and call.function.name) or ""
                arguments += (call.function and call.function.arguments) or ""
    else:
        [call] = client.chat.completions.create(**asked).choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
        assert call.id.startswith("call_")
    assert name in names and set(json.loads(arguments)) == {"city"}


PERSON: Any = {
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12, "title": "Name"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "home": {"$ref": "#/$defs/Home"},
    },
    "required": ["name", "age", "home"],
    "$defs": {
        "Home": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12, "format": "city"}},
            "required": ["city"],
        }
    },
}
"""As pydantic writes it: nothing says that there are no other properties."""
FORM: Any = {"type": "json_schema", "json_schema": {"name": "Person", "schema": PERSON}}


def names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


FIELDS: dict[str, Any] = {
    "response_format": {"response_format": FORM},
    "guided_json": {"guided_json": PERSON},
    "structured_outputs": {"structured_outputs": {"json": json.dumps(PERSON)}},
    "tools": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": PERSON}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_object"},
    },
}
SOON = (("response_format", True), ("tools", False))


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        pytest.param(kind, stream, marks=() if (kind, stream) in SOON else pytest.mark.long)
        for kind in FIELDS
        for stream in (False, True)
    ],
)
def test_an_answer_has_what_the_schema_names_and_ends(url: str, kind: str, stream: bool) -> None:
    body = {"messages": MESSAGES, "max_tokens": 200, "temperature": 1, "seed": 3, **FIELDS[kind]}
    if stream:
        reply = httpx.post(f"{url}/v1/chat/completions", json=body | {"stream": True}, timeout=60)
        lines = reply.text.split("\n\n")
        pieces = [
            json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")
        ]
        calls = [one["delta"].get("tool_calls", [{}])[0] for one in pieces]
        text = "".join(one["delta"].get("content") or "" for one in pieces)
        text += "".join(one.get("function", {}).get("arguments", "") for one in calls)
        reason = pieces[-1]["finish_reason"]
    else:
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        [choice] = reply.json()["choices"]
        message, reason = choice["message"], choice["finish_reason"]
        text = message["content"] or message["tool_calls"][0]["function"]["arguments"]
    person = json.loads(text, object_pairs_hook=names_once)
    jsonschema.validate(person, PERSON)
    assert (set(person), set(person["home"])) == ({"name", "age", "home"}, {"city"})
    assert reason == "stop"


@pytest.mark.parametrize("calls", [False, True])
def test_with_auto_an_answer_is_in_the_format_or_calls(
    client: openai.OpenAI, tokenizer: Any, calls: bool
) -> None:
    never = tokenizer("<", add_special_tokens=False)["input_ids"][:1]
    if calls:
        never = [token for text, token in tokenizer.get_vocab().items() if text.startswith("{")]
    reply = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, tools=TOOLS, max_tokens=200, temperature=0,
        response_format=FORM, logit_bias={str(token): -100 for token in never},
        parallel_tool_calls=False,
    )  # fmt: skip
    [choice] = reply.choices
    if calls:
        assert choice.message.tool_calls and not choice.message.content
        [call] = choice.message.tool_calls
        assert call.type == "function" and call.function.name in {"weather", "time"}
        assert set(json.loads(call.function.arguments)) == {"city"}
        assert choice.finish_reason == "tool_calls"
    else:
        jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
        assert choice.finish_reason == "stop" and not choice.message.tool_calls


def test_a_function_that_is_not_followed_whole_fails_no_other(client: openai.OpenAI) -> None:
    odd: Any = {"type": "string", "format": "path", "pattern": "(?!x)", "maxLength": 5}
    parameters = {"type": "object", "properties": {"p": {"$ref": "#/$defs/T"}}, "required": ["p"]}
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": parameters | {"$defs": one}}}
        for name, one in (("read", {"T": odd}), ("count", {"T": {"type": "boolean"}}))
    ]
    reply = client.chat.completions.create(
        model="smollm2", messages=MESSAGES, tools=tools, tool_choice="required", max_tokens=64,
        temperature=0, parallel_tool_calls=False,
    )  # fmt: skip
    [call] = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    kind = {"read": str, "count": bool}[call.function.name]
    assert [type(value) for value in json.loads(call.function.arguments).values()] == [kind]


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
WRITTEN = f"<think>hm</think>{CALL}"


@pytest.mark.parametrize("tool_choice", ["auto", pytest.param("none", marks=pytest.mark.long)])
def test_reasoning_and_calls_are_read_from_the_text(
    client: openai.OpenAI, tool_choice: Any
) -> None:
    asked: Any = {"model": "smollm2", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 64}
    asked |= {"tool_choice": tool_choice, "extra_body": {"guided_choice": [WRITTEN]}}
    whole = client.chat.completions.create(**asked).choices[0]
    told: Any = whole.message
    content, reasoning, name, arguments, reasons = "", "", "", "", []
    for chunk in client.chat.completions.create(**asked, stream=True):
        delta: Any = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert reasoning == told.reasoning_content == "hm"
    assert reasons[-1] == whole.finish_reason and set(reasons[:-1]) == {None}
    if tool_choice == "none":
        assert content == told.content == CALL and not told.tool_calls
        return
    [call] = told.tool_calls
    assert (name, json.loads(arguments)) == ("weather", {"city": "Bern"})
    assert (call.function.name, call.function.arguments) == (name, arguments)
    assert whole.finish_reason == "tool_calls" and not content and told.content is None


def test_reasoning_is_not_told_to_who_does_not_want_it(client: openai.OpenAI) -> None:
    extra = {"guided_choice": [WRITTEN], "include_reasoning": False}
    asked: Any = {"model": "smollm2", "messages": MESSAGES, "tools": TOOLS, "extra_body": extra}
    told: Any = client.chat.completions.create(**asked).choices[0].message
    assert getattr(told, "reasoning_content", None) is None
    assert told.tool_calls[0].function.name == "weather"


def test_models_tokens_and_version(client: openai.OpenAI, url: str, tokenizer: Any) -> None:
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    told = httpx.post(f"{url}/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert told["tokens"] == tokenizer(PROMPT)["input_ids"] and told["count"] == len(told["tokens"])
    assert "".join(told["token_strs"]) == PROMPT
    back = httpx.post(f"{url}/detokenize", json={"tokens": told["tokens"]}).json()
    assert back == {"prompt": PROMPT}
    chat = httpx.post(f"{url}/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert chat == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert httpx.get(f"{url}/version").json()["version"]
    refused = httpx.post(
        f"{url}/v1/chat/completions",
        json={"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
    )
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs"
