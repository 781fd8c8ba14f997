"""Request bodies: defaults, limits, and what is refused by name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.server.api.schemas import MAX_PROMPTS, ChatMessage, ChatRequest, CompletionRequest

HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "hello"} | fields)


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": HELLO} | fields)


def test_defaults_are_vllms() -> None:
    assert completion().sampling(100) == SamplingParams(max_tokens=16)
    assert chat().sampling(100) == SamplingParams(max_tokens=100)


def test_null_means_the_default() -> None:
    nulls = dict.fromkeys(
        ("temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "n", "stream_options")
    )
    assert completion(**nulls).sampling(100) == SamplingParams(max_tokens=16)
    assert completion(max_tokens=None).sampling(100).max_tokens == 100


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
    sampling = completion(**given_fields).sampling(100)
    assert sampling == SamplingParams(0.5, 40, 0.9, 7, 3, ("a", "b"), (1, 2), True, 4, True)


@pytest.mark.parametrize("hint", ["yes", 1, 0.0, [True]])
def test_a_hint_is_true_or_false(hint: Any) -> None:
    with pytest.raises(ValidationError, match="will_return"):
        chat(will_return=hint)
    assert chat(will_return=None).sampling(9).will_return is None


@pytest.mark.parametrize("n", [0, -1, 129])
def test_a_number_of_answers_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(ChangeSomething) as caught:
        completion(n=n).sampling(100)
    assert caught.value.field == "n"


def test_one_stop_string_needs_no_list() -> None:
    assert completion(stop="end").sampling(100).stop == ("end",)


def test_the_newer_name_of_the_limit_wins() -> None:
    assert chat(max_tokens=5).sampling(100).max_tokens == 5
    assert chat(max_completion_tokens=6).sampling(100).max_tokens == 6
    assert chat(max_tokens=5, max_completion_tokens=6).sampling(100).max_tokens == 6


def test_a_limit_beyond_the_context_is_refused_with_one_that_fits() -> None:
    assert completion(max_tokens=10).sampling(10).max_tokens == 10
    with pytest.raises(ChangeSomething, match="ask for at most 9"):
        completion(max_tokens=10).sampling(9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("echo", True),
        ("logprobs", 0),
        ("suffix", "tail"),
        ("frequency_penalty", 0.1),
        ("presence_penalty", -0.1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1.0}),
    ],
)
def test_completion_fields_that_are_not_served_are_refused(field: str, value: object) -> None:
    with pytest.raises(ChangeSomething, match="is not supported") as caught:
        completion(**{field: value}).sampling(100)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("logprobs", True, False),
        ("top_logprobs", 2, 0),
        ("tools", [{"type": "function"}], []),
        ("tool_choice", "required", "none"),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
    ],
)
def test_chat_fields_that_are_not_served_are_refused_unless_neutral(
    field: str, value: object, neutral: object
) -> None:
    with pytest.raises(ChangeSomething) as caught:
        chat(**{field: value}).sampling(100)
    assert caught.value.field == field
    assert chat(**{field: neutral}).sampling(100).max_tokens == 100
    assert chat(**{field: None}).sampling(100).max_tokens == 100


@given(st.floats(allow_nan=True, allow_infinity=True), st.floats(), st.integers(), st.integers())
def test_any_numbers_are_either_valid_or_refused_by_name(
    temperature: float, top_p: float, seed: int, max_tokens: int
) -> None:
    fields = {"temperature": temperature, "top_p": top_p, "seed": seed, "max_tokens": max_tokens}
    try:
        sampling = completion(**fields).sampling(1000)
    except (ChangeSomething, ValidationError) as error:
        assert any(name in str(error) for name in fields)
        return
    assert 0 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1
    assert sampling.max_tokens is not None
    assert 1 <= sampling.max_tokens <= 1000


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_come_in_four_forms(prompt: object, prompts: list[object]) -> None:
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize("prompt", [[], ["x"] * (MAX_PROMPTS + 1)])
def test_no_prompt_and_too_many_are_refused(prompt: list[str]) -> None:
    with pytest.raises(ChangeSomething, match=f"{len(prompt)} prompts"):
        completion(prompt=prompt).prompts()


@pytest.mark.parametrize("prompt", [7, None, {"a": 1}, ["a", 1], [[1], "a"], [-1], [2**31], [1.5]])
def test_other_forms_of_prompt_are_invalid(prompt: object) -> None:
    with pytest.raises(ValidationError):
        completion(prompt=prompt)


def test_an_unknown_field_is_invalid() -> None:
    with pytest.raises(ValidationError, match="colour"):
        chat(colour="red")


def test_messages_become_plain_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = ChatMessage.model_validate({"role": "developer", "content": parts, "name": "x"})
    assert message.plain() == {"role": "system", "content": "ab"}
    assert ChatMessage(role="tool", content="4").plain() == {"role": "tool", "content": "4"}


def test_images_are_invalid_until_they_are_served() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(ValidationError):
        chat(messages=[{"role": "user", "content": [image]}])


def test_usage_is_streamed_on_request_only() -> None:
    assert not completion().include_usage()
    assert not completion(stream_options={}).include_usage()
    assert completion(stream_options={"include_usage": True}).include_usage()


def test_usage_with_every_piece_only_where_usage_is_wanted() -> None:
    every = {"continuous_usage_stats": True}
    assert not completion(stream_options=every).continuous_usage()
    assert not completion(stream_options={"include_usage": True}).continuous_usage()
    assert completion(stream_options=every | {"include_usage": True}).continuous_usage()
