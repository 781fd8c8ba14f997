"""Structured answers of a model that reasons first, from ``kvell serve``, streamed and whole."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from jsonschema import validate

from tests.llm.servers import serving
from tests.llm.thinking_model import START, STOP, write_thinking

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
FORMATS: dict[str, Any] = {
    "response_format": {"response_format": FORM},
    "guided_json": {"extra_body": {"guided_json": SCHEMA}},
    "structured_outputs": {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
    "one function": {"tools": [TOOL], "tool_choice": NAMED},
    "required": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
}
SOON = "response_format"
KINDS = [pytest.param(kind, marks=() if kind == SOON else pytest.mark.long) for kind in FORMATS]
SPECIAL = {str(token): -100.0 for token in range(17) if token != STOP}
"""Bans what else would end the model's text: it has learned nothing of tags."""
WELL = 876
"""The token " well"."""
ENDS_SOON: Any = {"logit_bias": {str(WELL): 100.0, str(STOP): 55.0}, "frequency_penalty": 2.0}
"""The model says "well" until the penalty weighs more, then ends its reasoning."""
ENDS_SOMETIMES = SPECIAL | {str(STOP): 4.0}
NEVER_ENDS = SPECIAL | {str(STOP): -100.0}


@dataclass
class Answer:
    """What a client puts together of an answer."""

    reasoning: str
    content: str
    arguments: list[str]
    finish_reason: str | None
    has_ended_reasoning: bool

    @property
    def told(self) -> Any:
        return json.loads(self.arguments[0] if self.arguments else self.content)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    return write_thinking(smollm2_path, tmp_path_factory.mktemp("thinking"))


@pytest.fixture(scope="module")
def client(path: Path) -> Iterator[openai.OpenAI]:
    flags = ["--model", f"thinking={path}", "--kv-memory", "64MiB", "--dtype", "float32"]
    with serving(path.parent, *flags, "--max-model-len", "512") as served:
        yield openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def asked(thinks: bool | None, **fields: Any) -> dict[str, Any]:
    extra = fields.pop("extra_body", {})
    if thinks is not None:
        extra = extra | {"chat_template_kwargs": {"enable_thinking": thinks}}
    body = {"model": "thinking", "messages": MESSAGES, "temperature": 0, "max_tokens": 120}
    return body | fields | {"extra_body": extra | {"return_token_ids": True}}


def whole(client: openai.OpenAI, thinks: bool | None, **fields: Any) -> Answer:
    [choice] = client.chat.completions.create(**asked(thinks, **fields)).choices
    message: Any = choice.message
    calls = [call.function.arguments for call in message.tool_calls or []]
    reasoning = getattr(message, "reasoning_content", None) or ""
    has_ended = STOP in choice.token_ids
    return Answer(reasoning, message.content or "", calls, choice.finish_reason, has_ended)


def streamed(client: openai.OpenAI, thinks: bool | None, **fields: Any) -> Answer:
    answer = Answer("", "", [], None, False)
    for chunk in client.chat.completions.create(**asked(thinks, **fields), stream=True):
        [choice] = chunk.choices
        delta: Any = choice.delta
        reasoning = getattr(delta, "reasoning_content", None) or ""
        assert not (reasoning and answer.content), "content never comes before reasoning"
        answer.reasoning += reasoning
        answer.content += delta.content or ""
        for call in delta.tool_calls or []:
            answer.arguments += [""] * (call.index + 1 - len(answer.arguments))
            answer.arguments[call.index] += call.function.arguments or ""
        answer.finish_reason = choice.finish_reason
        answer.has_ended_reasoning |= STOP in (getattr(choice, "token_ids", None) or ())
    return answer


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_reasons_freely_and_its_answer_obeys(client: openai.OpenAI, kind: str) -> None:
    """A grammar that held from the first token would let it neither say this nor end it."""
    fields = FORMATS[kind] | ENDS_SOON
    answer = whole(client, True, **fields)
    assert streamed(client, True, **fields) == answer
    assert answer.has_ended_reasoning and set(answer.reasoning.split()) == {"well"}
    assert answer.finish_reason in ("stop", "tool_calls")
    assert bool(answer.arguments) == ("tools" in FORMATS[kind])
    validate(answer.told, SCHEMA)


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_closed_the_reasoning_binds_from_the_first_token(
    client: openai.OpenAI, kind: str
) -> None:
    answer = whole(client, False, **FORMATS[kind])
    assert streamed(client, False, **FORMATS[kind]) == answer
    assert not answer.reasoning
    validate(answer.told, SCHEMA)


def test_where_the_model_has_the_choice_it_reasons_or_answers(client: openai.OpenAI) -> None:
    at_once = whole(client, None, response_format=FORM)
    assert not at_once.reasoning
    validate(at_once.told, SCHEMA)
    prefers = ENDS_SOON | {"logit_bias": {str(START): 100.0, str(STOP): 80.0}}
    thinks = whole(client, None, response_format=FORM, **prefers)
    assert streamed(client, None, response_format=FORM, **prefers) == thinks
    assert thinks.has_ended_reasoning
    assert not thinks.reasoning.replace("<think>", "").strip(), "it says its tag again and again"
    validate(thinks.told, SCHEMA)


@pytest.mark.parametrize("read", [whole, pytest.param(streamed, marks=pytest.mark.long)])
def test_reasoning_that_never_ends_is_cut_off(client: openai.OpenAI, read: Any) -> None:
    answer = read(client, True, response_format=FORM, logit_bias=NEVER_ENDS, max_tokens=20)
    assert (answer.content, answer.finish_reason) == ("", "length")
    free = read(client, True, logit_bias=NEVER_ENDS, max_tokens=20)
    assert answer.reasoning and answer.reasoning == free.reasoning, "nothing binds it"


@pytest.mark.parametrize(
    ("budget", "read"),
    [
        (7, streamed),
        pytest.param(0, whole, marks=pytest.mark.long),
        pytest.param(0, streamed, marks=pytest.mark.long),
        pytest.param(1, whole, marks=pytest.mark.long),
        pytest.param(1, streamed, marks=pytest.mark.long),
        pytest.param(7, whole, marks=pytest.mark.long),
    ],
)
def test_a_budget_ends_the_reasoning_and_the_answer_follows(
    client: openai.OpenAI, read: Any, budget: int
) -> None:
    fields: Any = {"logit_bias": NEVER_ENDS, "max_tokens": 20}
    bound = {"extra_body": {"thinking_token_budget": budget}}
    free, answer = read(client, True, **fields), read(client, True, **fields, **bound)
    assert not free.content and answer.content and answer.has_ended_reasoning
    assert free.reasoning.startswith(answer.reasoning)
    unbound = {"extra_body": {"thinking_token_budget": -1}}
    assert read(client, True, **fields, **unbound) == free
    if budget == 7:
        formed = read(client, True, **fields | {"max_tokens": 120}, response_format=FORM, **bound)
        assert formed.reasoning == answer.reasoning
        validate(formed.told, SCHEMA)


@pytest.mark.parametrize("thinks", [pytest.param(True, marks=pytest.mark.long), None])
def test_tokens_of_reasoning_are_counted_to_the_last(
    client: openai.OpenAI, thinks: bool | None
) -> None:
    fields = asked(thinks, max_tokens=20, extra_body={"thinking_token_budget": 5})
    if thinks is None:
        prefers = SPECIAL | {str(START): 60.0, str(STOP): -100.0}
        fields |= {"logit_bias": prefers, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    reply: Any = client.chat.completions.create(**fields)
    ids = reply.choices[0].token_ids
    begin = ids.index(START) + 1 if thinks is None else 0
    assert ids.index(STOP) == begin + 5
    assert reply.usage.completion_tokens_details.reasoning_tokens == 5
    *_, last = client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage.completion_tokens_details.reasoning_tokens == 5


def test_no_budget_is_needed_where_the_reasoning_is_closed(client: openai.OpenAI) -> None:
    budget = {"thinking_token_budget": 1}
    fields = asked(False, max_tokens=5, logit_bias=NEVER_ENDS, extra_body=budget)
    reply: Any = client.chat.completions.create(**fields)
    assert STOP not in reply.choices[0].token_ids and reply.choices[0].message.content
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.long
def test_messages_and_responses_have_budgets_too(client: openai.OpenAI) -> None:
    url = str(client.base_url).removesuffix("/v1/")
    body = {"model": "thinking", "max_tokens": 30, "messages": MESSAGES, "temperature": 0}
    thinking = {"type": "enabled", "budget_tokens": 4}
    told = httpx.post(f"{url}/v1/messages", json=body | {"thinking": thinking}, timeout=60)
    message: Any = told.json()
    assert [one["type"] for one in message["content"]] == ["thinking", "text"], message
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 4}
    extra: Any = {
        "thinking_token_budget": 4,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    reply = client.responses.create(
        model="thinking", input="What is the weather in Bern?", temperature=0,
        max_output_tokens=30, extra_body=extra,
    )  # fmt: skip
    assert [one.type for one in reply.output] == ["reasoning", "message"]
    assert reply.usage and reply.usage.output_tokens_details.reasoning_tokens == 4


@pytest.mark.long
def test_answers_beside_each_other_are_bound_each_in_its_own_time(client: openai.OpenAI) -> None:
    """Drawn with seeds: some end their reasoning, some do not."""
    drawn = {"temperature": 1.0, "seed": 3, "n": 8, "max_tokens": 60}
    fields = asked(True, response_format=FORM, logit_bias=ENDS_SOMETIMES, **drawn)
    choices = client.chat.completions.create(**fields).choices
    bound = [one.message.content for one in choices if one.message.content]
    for content in bound:
        assert content.startswith("{")
    free = [one for one in choices if not one.message.content]
    assert bound and free, "some end their reasoning, some do not"
    assert all(STOP not in one.token_ids for one in free)


def test_responses_bind_behind_the_reasoning_too(client: openai.OpenAI) -> None:
    reply = client.responses.create(
        model="thinking",
        input="What is the weather in Bern?",
        temperature=0,
        max_output_tokens=64,
        text={"format": {"type": "json_schema", "name": "form", "schema": SCHEMA}},
    )
    validate(json.loads(reply.output_text), SCHEMA)
