"""Sampling parameters: each field's bounds, refused by name, and what follows from them."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from kvell.engine.protocol.codec import decode_command, decode_event, encode_frame
from kvell.engine.protocol.logprobs import MAX_LOGPROBS, PromptLogprobs, TokenLogprobs
from kvell.engine.protocol.messages import Command, Event, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_PENALTY,
    SamplingParams,
)
from kvell.engine.protocol.structured_outputs import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    CallForm,
    Calls,
    Reasoning,
    ReasoningBudget,
    StructuredOutputs,
)
from kvell.errors import ChangeSomething
from kvell.vocabulary import RequestId
from kvell.wire.frames import HEADER_BYTES, ProtocolError

NAN = float("nan")
GRAMMAR = StructuredOutputs(regex="a*")

REFUSED: list[tuple[str, Any]] = [
    *[("min_p", bad) for bad in (-0.01, 1.01, NAN)],
    *[("presence_penalty", bad) for bad in (-2.01, 2.01, NAN)],
    *[("frequency_penalty", bad) for bad in (-2.01, 2.01, NAN)],
    *[("repetition_penalty", bad) for bad in (0.0, 1e-7, -1.0, 100.1, NAN)],
    *[("min_tokens", bad) for bad in (-1, 17)],  # of the 16 that max_tokens allows
    *[("logprobs", bad) for bad in (-1, MAX_LOGPROBS + 1)],
    *[("prompt_logprobs", bad) for bad in (-1, MAX_LOGPROBS + 1)],
    *[("logit_bias", bad) for bad in ({-1: 1.0}, {5: 100.5}, {5: -100.5}, {5: NAN})],
    ("logit_bias", {5: float("inf")}),
    ("logit_bias", dict.fromkeys(range(MAX_BIASES + 1), 1.0)),
    *[("allowed_token_ids", bad) for bad in ((), (5, -1), (0,) * (MAX_ALLOWED_TOKENS + 1))],
    *[("bad_words", bad) for bad in (("a", ""), ("a",) * (MAX_BAD_WORDS + 1))],
    ("bad_words", ("a" * (MAX_BAD_WORD_CHARS + 1),)),
    *[("bad_words_token_ids", bad) for bad in (((),), ((1, -1),))],
    ("bad_words_token_ids", ((1,),) * (2 * MAX_BAD_WORDS + 1)),
]


@pytest.mark.parametrize(("field", "bad"), REFUSED)
def test_what_is_out_of_bounds_is_refused_by_name_and_with_a_remedy(field: str, bad: Any) -> None:
    with pytest.raises(ChangeSomething) as told:
        SamplingParams(**{field: bad})
    assert told.value.field == field
    assert told.value.problem
    assert any(told.value.remedy.startswith(word) for word in ("use ", "leave it out", "correct"))


ACCEPTED: list[tuple[str, Any]] = [
    *[("min_p", good) for good in (0.0, 1.0)],
    *[("presence_penalty", good) for good in (-MAX_PENALTY, MAX_PENALTY)],
    *[("frequency_penalty", good) for good in (-MAX_PENALTY, MAX_PENALTY)],
    *[("repetition_penalty", good) for good in (1e-6, 100.0)],
    *[("min_tokens", good) for good in (0, 16)],
    *[("logprobs", good) for good in (None, 0, MAX_LOGPROBS)],
    *[("prompt_logprobs", good) for good in (None, 0, MAX_LOGPROBS)],
    *[("logit_bias", good) for good in ({}, {0: MAX_BIAS}, {5: -MAX_BIAS})],
    ("logit_bias", dict.fromkeys(range(MAX_BIASES), 1.0)),
    ("structured_outputs", GRAMMAR),
    *[("allowed_token_ids", good) for good in (None, (0,), (7,) * MAX_ALLOWED_TOKENS)],
    *[("bad_words", good) for good in ((), ("a" * MAX_BAD_WORD_CHARS,) * MAX_BAD_WORDS)],
    ("bad_words_token_ids", ((1, 2),) * (2 * MAX_BAD_WORDS)),
    *[("reasoning_budget", ReasoningBudget(tokens, 0)) for tokens in (0, 1 << 31)],
]


@pytest.mark.parametrize(("field", "good"), ACCEPTED)
def test_the_bounds_themselves_are_accepted(field: str, good: Any) -> None:
    assert getattr(SamplingParams(**{field: good}), field) == good


def test_lists_are_taken_as_vllms_callers_write_them() -> None:
    given_lists: dict[str, Any] = {"bad_words": ["a"], "allowed_token_ids": [1, 2]}
    params = SamplingParams(**given_lists)
    assert (params.bad_words, params.allowed_token_ids) == (("a",), (1, 2))


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"tokens": -1, "end": 3}, "thinking_token_budget"),
        ({"tokens": 1, "end": -3}, "reasoning_budget"),
        ({"tokens": 1, "end": 3, "start": -1}, "reasoning_budget"),
        ({"tokens": 1, "end": 3, "calls": (2, -1)}, "reasoning_budget"),
    ],
)
def test_a_budget_of_reasoning_has_bounds(wish: dict[str, Any], field: str) -> None:
    with pytest.raises(ChangeSomething) as told:
        ReasoningBudget(**wish)
    assert told.value.field == field


def test_without_max_tokens_any_minimum_will_do() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=10_000).looks_back


LOOKS_BACK: list[dict[str, Any]] = [
    {"presence_penalty": 0.1},
    {"frequency_penalty": -0.1},
    {"repetition_penalty": 0.9},
    {"min_tokens": 1},
    {"structured_outputs": GRAMMAR},
    {"bad_words_token_ids": ((1,),)},
    {"reasoning_budget": ReasoningBudget(0, 3)},
]
TELLS_OR_BIASES: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"prompt_logprobs": 0},
    {"logit_bias": {3: 1.0}},
    {"allowed_token_ids": (3,)},
]


def test_what_looks_back_and_what_is_plain() -> None:
    drawn = SamplingParams(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=3, stop=("x",))
    assert drawn.is_plain
    assert not drawn.looks_back
    for wish in LOOKS_BACK:
        params = SamplingParams(**wish)
        assert params.looks_back
        assert not params.is_plain
    for wish in TELLS_OR_BIASES:
        params = SamplingParams(**wish)
        assert not params.looks_back
        assert not params.is_plain


KINDS: dict[str, Any] = {
    "json": "{}",
    "json_object": True,
    "regex": "a",
    "choice": ("a", "b"),
    "grammar": "start: /a/",
}


def test_each_kind_of_constraint_stands_alone() -> None:
    for name, value in KINDS.items():
        assert StructuredOutputs(**{name: value}).kind == name
    with pytest.raises(ChangeSomething, match="structured_outputs=none: is not one constraint"):
        StructuredOutputs()
    for name in KINDS:
        for other in KINDS.keys() - {name}:
            with pytest.raises(ChangeSomething, match="is not one constraint") as told:
                StructuredOutputs(**{name: KINDS[name], other: KINDS[other]})
            assert {name, other} <= set(str(told.value.value).split(", "))


@pytest.mark.parametrize("kind", ["json", "regex", "grammar", "choice"])
def test_constraints_have_a_longest_length(kind: str) -> None:
    text = "a" * MAX_GRAMMAR_CHARS
    values: Mapping[str, Any] = {kind: (text,) if kind == "choice" else text}
    assert StructuredOutputs(**values).num_chars == MAX_GRAMMAR_CHARS
    longer: Mapping[str, Any] = {kind: (text, "a") if kind == "choice" else text + "a"}
    with pytest.raises(ChangeSomething, match="is too long; use at most") as told:
        StructuredOutputs(**longer)
    assert told.value.field == f"structured_outputs.{kind}"


@pytest.mark.parametrize("bad", [("a", ""), ("a",) * (MAX_CHOICES + 1)])
def test_choices_are_some_texts_and_none_is_empty(bad: tuple[str, ...]) -> None:
    with pytest.raises(ChangeSomething) as told:
        StructuredOutputs(choice=bad)
    assert told.value.field == "structured_outputs.choice"


@pytest.mark.parametrize("kind", ["json", "regex", "grammar"])
def test_an_empty_constraint_is_named(kind: str) -> None:
    empty: Mapping[str, Any] = {kind: ""}
    with pytest.raises(ChangeSomething, match=f"structured_outputs.{kind}='': is empty"):
        StructuredOutputs(**empty)
    with pytest.raises(ChangeSomething, match="guided_x='': is empty"):
        StructuredOutputs(**empty, named="guided_x")


def test_calls_go_with_json_alone() -> None:
    calls = Calls((CallForm("<call>", "{}", "</call>"),))
    assert StructuredOutputs(json="{}", calls=calls).num_chars == 17
    assert StructuredOutputs(json_object=True, calls=calls).kind == "json_object"
    with pytest.raises(ChangeSomething, match=r"outputs\.regex=…: cannot be combined with calls"):
        StructuredOutputs(regex="a", calls=calls)


def test_what_a_client_called_it_makes_no_other_constraint() -> None:
    named = StructuredOutputs(regex="a", named="guided_regex", reasoning=Reasoning(("x",)))
    assert named.bare() == StructuredOutputs(regex="a")
    assert named.bare().named == ""
    assert (named.field_name, named.bare().field_name) == (
        "guided_regex",
        "structured_outputs.regex",
    )


small = st.floats(-50, 0)
tokens = st.integers(0, 2**31 - 1)
likelihoods = st.builds(
    TokenLogprobs,
    small,
    st.integers(1, 1 << 20),
    st.lists(st.tuples(tokens, small), max_size=3).map(tuple),
)
some_likelihoods = st.lists(likelihoods, max_size=4).map(tuple)
constraints = st.one_of(
    st.text(min_size=1, max_size=9).map(lambda text: StructuredOutputs(json=text)),
    st.text(min_size=1, max_size=9).map(lambda text: StructuredOutputs(regex=text)),
    st.text(min_size=1, max_size=9).map(lambda text: StructuredOutputs(grammar=text)),
    st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3).map(
        lambda texts: StructuredOutputs(choice=tuple(texts))
    ),
    st.just(StructuredOutputs(json_object=True)),
)
tags = st.text(min_size=1, max_size=9)
reasonings = st.builds(
    Reasoning, st.lists(tags, min_size=1, max_size=3).map(tuple), st.just("") | tags
)
behind_reasoning = st.builds(
    lambda asked, reasoning: replace(asked, reasoning=reasoning), constraints, reasonings
)
call_forms = st.builds(CallForm, st.text(max_size=9), st.text(max_size=9), tags)
beside_calls = st.builds(
    StructuredOutputs,
    json=tags,
    calls=st.builds(Calls, st.lists(call_forms, max_size=2).map(tuple), tags, st.booleans()),
    named=tags,
)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.none(),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=4),
    min_tokens=st.integers(0, 1 << 40),
    logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
    prompt_logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
    structured_outputs=st.none() | constraints | behind_reasoning | beside_calls,
    bad_words=st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=4).map(tuple),
    include_stop_str_in_output=st.booleans(),
    skip_special_tokens=st.booleans(),
    bad_words_token_ids=st.lists(
        st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3
    ).map(tuple),
    reasoning_budget=st.none()
    | st.builds(ReasoningBudget, st.integers(0, 1 << 40), tokens, st.none() | tokens),
)


def body_of(message: Command | Event) -> bytes:
    return encode_frame(message)[HEADER_BYTES:]


@given(samplings, st.booleans())
def test_every_wish_survives_the_round_trip(sampling: SamplingParams, asked: bool) -> None:
    submit = Submit(RequestSpec(RequestId("a"), b"\1\0\0\0", sampling))
    if asked:  # what is remembered of a request is not a part of it
        assert sampling.is_plain in (True, False)
        assert sampling.looks_back in (True, False)
    decoded = decode_command(body_of(submit))
    assert decoded == submit
    assert isinstance(decoded, Submit)
    for field in fields(SamplingParams):
        assert getattr(decoded.spec.sampling, field.name) == getattr(sampling, field.name)


@given(st.lists(tokens, max_size=4).map(tuple), some_likelihoods)
def test_tokens_bring_their_likelihoods(
    ids: tuple[int, ...], told: tuple[TokenLogprobs, ...]
) -> None:
    event = Tokens(RequestId("a"), 2, 3, ids, logprobs=told)
    assert decode_event(body_of(event)) == event


@given(st.integers(1, 1 << 40), some_likelihoods)
def test_prompts_bring_theirs(first: int, told: tuple[TokenLogprobs, ...]) -> None:
    event = PromptLogprobs(RequestId("a"), 1, first, told)
    assert decode_event(body_of(event)) == event


BAD_WISHES: list[tuple[str, Any]] = [
    ("min_p", 2.0),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", {5: 1000.0}),
    ("logprobs", 21),
    ("allowed_token_ids", []),
    ("allowed_token_ids", ["5"]),
    ("bad_words_token_ids", [[]]),
    ("structured_outputs", {}),
    ("structured_outputs", {"json": "{}", "regex": "a"}),
    ("structured_outputs", {"colour": "red"}),
    ("structured_outputs", {"regex": "a", "reasoning": {}}),
    ("structured_outputs", {"regex": "a", "reasoning": {"ends": []}}),
    ("structured_outputs", {"regex": "a", "reasoning": {"ends": ["a", ""]}}),
    ("structured_outputs", {"regex": "a", "reasoning": {"ends": ["a"] * 9}}),
    ("structured_outputs", {"regex": "a", "reasoning": {"ends": ["a"], "start": "<" * 65}}),
]


@pytest.mark.parametrize(("field", "bad"), BAD_WISHES)
def test_a_submission_with_a_bad_wish_is_refused(field: str, bad: Any) -> None:
    body = {"request_id": "a", "prompt": b"", "sampling": {field: bad}}
    with pytest.raises(ProtocolError):
        decode_command(msgspec.msgpack.encode(("Submit", body)))


def test_likelihoods_of_the_wrong_form_are_refused() -> None:
    body = {"request_id": "a", "attempt": 0, "first_index": 1, "logprobs": [[0.0, "first", []]]}
    with pytest.raises(ProtocolError):
        decode_event(msgspec.msgpack.encode(("PromptLogprobs", body)))
    with pytest.raises(ProtocolError, match="colour"):
        decode_event(msgspec.msgpack.encode(("PromptLogprobs", {**body, "colour": 1})))
