"""Request bodies: defaults, limits, and what is refused by name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.schemas.strict import StrictPart
from kvell.engine.protocol.structured_outputs import StructuredOutputs, json_text
from kvell.errors import ChangeSomething
from kvell.server.api.schemas.chat import ChatMessage
from kvell.server.api.schemas.generation import MAX_PROMPTS
from kvell.server.text.text_bounds import AnswerRoom
from tests.server.api.bodies import HELLO, chat, completion, room


def test_defaults_are_vllms() -> None:
    assert completion().sampling(room(100)) == SamplingParams(max_tokens=16)
    assert chat().sampling(room(100)) == SamplingParams(max_tokens=100)


def test_room_that_others_lend_is_there_for_who_asks_for_it() -> None:
    both = AnswerRoom(100, 900)
    assert chat().sampling(both).max_tokens == 100
    assert chat(max_tokens=900).sampling(both).max_tokens == 900
    assert chat(max_tokens=901).sampling(both).max_tokens == 900


def test_null_means_the_default() -> None:
    nulls = dict.fromkeys(
        ("temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "n", "stream_options")
    )
    assert completion(**nulls).sampling(room(100)) == SamplingParams(max_tokens=16)
    assert completion(max_tokens=None).sampling(room(100)).max_tokens == 100


def test_every_sampling_field_reaches_the_engine() -> None:
    given_fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "max_tokens": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "n": 4,
        "will_return": True,
    }
    sampling = completion(**given_fields).sampling(room(100))
    assert sampling == SamplingParams(0.5, 40, 0.9, 7, 3, ("a", "b"), (1, 2), True, 4, True)


@pytest.mark.parametrize("hint", ["yes", 1, 0.0, [True]])
def test_a_hint_is_true_or_false(hint: Any) -> None:
    with pytest.raises(ValidationError, match="will_return"):
        chat(will_return=hint)
    assert chat(will_return=None).sampling(room(9)).will_return is None


def test_one_stop_string_needs_no_list() -> None:
    assert completion(stop="end").sampling(room(100)).stop == ("end",)


def test_the_newer_name_of_the_limit_wins() -> None:
    assert chat(max_tokens=5).sampling(room(100)).max_tokens == 5
    assert chat(max_completion_tokens=6).sampling(room(100)).max_tokens == 6
    assert chat(max_tokens=5, max_completion_tokens=6).sampling(room(100)).max_tokens == 6


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_limit_beyond_the_context_is_lowered_to_what_fits(field: str) -> None:
    assert chat(**{field: 10}).sampling(room(10)).max_tokens == 10
    assert chat(**{field: 10}).sampling(room(9)).max_tokens == 9
    assert chat(**{field: 1_000_000}).sampling(room(9)).max_tokens == 9
    assert completion(max_tokens=10).sampling(room(9)).max_tokens == 9


def test_best_of_as_many_as_there_are_answers_is_no_choice() -> None:
    assert completion(best_of=3, n=3).sampling(room(100)).n == 3


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        *(
            ({"response_format": form}, StructuredOutputs(json=SCHEMA_TEXT))
            for form in (
                {"type": "json_object", "schema": SCHEMA},
                {"type": "json_schema", "schema": SCHEMA},
                {"type": "json_schema", "json_schema": {"schema": SCHEMA, "x-origin": "sdk"}},
            )
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            StructuredOutputs(json=SCHEMA_TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA_TEXT)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        ({"guided_json": SCHEMA_TEXT}, StructuredOutputs(json=SCHEMA_TEXT)),
        ({"guided_json": {}}, StructuredOutputs(json="{}")),
        ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
        ({"guided_grammar": "start: /a/"}, StructuredOutputs(grammar="start: /a/")),
    ],
)
def test_formats_become_one_constraint(
    fields: dict[str, Any], expected: StructuredOutputs | None
) -> None:
    assert chat(**fields).sampling(room(100)).structured_outputs == expected


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_regex": "a" * 200_000}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_json": ""}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ],
)
def test_formats_that_are_not_one_constraint_are_refused(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(ChangeSomething) as caught:
        chat(**fields).sampling(room(100))
    assert caught.value.field == field


BEYOND = {"type": "object", "properties": {"a": {"type": "string", "format": "path"}}}


@pytest.mark.parametrize("strict", [None, False, True])
def test_only_a_strict_schema_must_be_followed_whole(strict: bool | None) -> None:
    form = {"schema": BEYOND, "strict": strict}
    asked = chat(response_format={"type": "json_schema", "json_schema": form})
    made = asked.sampling(room(100)).structured_outputs
    field = "response_format.json_schema.schema"
    assert made is not None and made.field_name == field
    assert made.strict == ((StrictPart("", field),) if strict else ())


def test_a_constraint_knows_what_the_client_called_it() -> None:
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    for fields, field in (
        ({"response_format": form}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": "start: /a/"}, "guided_grammar"),
    ):
        made = chat(**fields).sampling(room(100)).structured_outputs
        assert made is not None and made.field_name == field


def test_a_schema_nested_too_deeply_is_refused_without_recursion() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(ChangeSomething, match="nested too deeply"):
        json_text(schema, "guided_json")
    while schema:  # taken apart by hand: Python itself frees nested objects by recursion
        schema = schema.pop("not")


def test_biases_name_tokens_by_number() -> None:
    assert chat(logit_bias={"5": 1.5}).sampling(room(100)).logit_bias == {5: 1.5}
    for key in ("five", "-1", "²", "9" * 30, ""):
        with pytest.raises(ChangeSomething, match="is not a token id"):
            chat(logit_bias={key: 1.0}).sampling(room(100))
    with pytest.raises(ValidationError, match="logit_bias"):
        chat(logit_bias={str(token): 1.0 for token in range(2000)})


def test_logprobs_of_chat_need_their_switch() -> None:
    assert chat(logprobs=True, top_logprobs=3).sampling(room(100)).logprobs == 3
    assert chat(logprobs=True).sampling(room(100)).logprobs == 0
    assert chat(logprobs=False, top_logprobs=0).sampling(room(100)).logprobs is None
    assert chat(top_logprobs=2).sampling(room(100)).logprobs == 2
    with pytest.raises(ChangeSomething) as caught:
        chat(logprobs=False, top_logprobs=2).sampling(room(100))
    assert caught.value.field == "top_logprobs"


def test_a_prompt_that_is_told_again_is_scored() -> None:
    scored = completion(echo=True, logprobs=2, max_tokens=0)
    sampling = scored.sampling(room(100))
    assert (sampling.prompt_logprobs, sampling.max_tokens) == (2, 1)
    assert scored.is_prompt_alone and not completion(echo=True).is_prompt_alone
    assert completion(logprobs=2).sampling(room(100)).prompt_logprobs is None
    with pytest.raises(ChangeSomething, match="max_tokens"):
        completion(max_tokens=0).sampling(room(100))


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "messages", "tools"])
def test_lists_are_bounded_before_any_work(field: str) -> None:
    item: dict[str, Any] = {"stop": "x", "stop_token_ids": 1, "messages": HELLO[0], "tools": {}}
    with pytest.raises(ValidationError, match=field):
        chat(**{field: [item[field]] * 100_000})


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(), st.integers(), st.integers())
def test_any_numbers_are_either_valid_or_refused_by_name(
    temperature: float, top_p: float, seed: int, max_tokens: int
) -> None:
    fields = {"temperature": temperature, "top_p": top_p, "seed": seed, "max_tokens": max_tokens}
    try:
        sampling = completion(**fields).sampling(room(1000))
    except (ChangeSomething, ValidationError) as error:
        assert any(name in str(error) for name in fields)
        return
    assert 0 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1
    assert sampling.max_tokens is not None
    assert 1 <= sampling.max_tokens <= 1000


@pytest.mark.parametrize("prompt", [[], ["x"] * (MAX_PROMPTS + 1)])
def test_no_prompt_and_too_many_are_refused(prompt: list[str]) -> None:
    with pytest.raises(ChangeSomething, match=f"{len(prompt)} prompts"):
        completion(prompt=prompt).prompts()


@pytest.mark.parametrize("prompt", [7, None, {"a": 1}, ["a", 1], [[1], "a"], [-1], [2**31], [1.5]])
def test_other_forms_of_prompt_are_invalid(prompt: object) -> None:
    with pytest.raises(ValidationError):
        completion(prompt=prompt)


def test_messages_keep_their_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = ChatMessage.model_validate({"role": "developer", "content": parts, "name": "x"})
    assert message.plain() == {"role": "developer", "content": parts, "name": "x"}
    assert ChatMessage(role="assistant").plain() == {"role": "assistant", "content": ""}


def test_an_image_keeps_its_place_among_texts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}]
    [message] = chat(messages=[{"role": "user", "content": parts}]).messages
    text = [{"type": "text", "text": one} for one in "ab"]
    assert message.plain()["content"] == [text[0], {"type": "image"}, text[1]]
    assert message.images() == ["data:image/png;base64,AAAA"]


def test_usage_with_every_piece_only_where_usage_is_wanted() -> None:
    every = {"continuous_usage_stats": True}
    assert not completion(stream_options=every).continuous_usage()
    assert not completion(stream_options={"include_usage": True}).continuous_usage()
    assert completion(stream_options=every | {"include_usage": True}).continuous_usage()
