"""Types of what users give in Python: as vLLM takes them, or refused by name."""

from typing import Any

import numpy as np
import pytest
import torch

from kvell.engine.protocol.given import given_prompt
from kvell.engine.protocol.sampling_params import DEFAULTS, READERS, SamplingParams
from kvell.engine.protocol.structured_outputs import MAX_SCHEMA_DEPTH, StructuredOutputs
from kvell.engine.requests.beam_search import BeamSearchParams
from kvell.errors import ChangeSomething

TAKEN: list[tuple[str, Any, Any]] = [
    ("stop", "Madrid", ("Madrid",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("bad_words", "Rome", ("Rome",)),
    ("bad_words", ["Rome"], ("Rome",)),
    ("stop_token_ids", [2, 7], (2, 7)),
    ("stop_token_ids", {7}, (7,)),
    ("stop_token_ids", np.array([2, 7], np.int32), (2, 7)),
    ("allowed_token_ids", [5], (5,)),
    ("logit_bias", {"504": 100}, {504: 100.0}),
    ("logit_bias", {np.int64(504): 1.5}, {504: 1.5}),
    ("logprobs", True, 1),
    ("prompt_logprobs", False, None),
    ("seed", -1, None),
    ("seed", np.int64(3), 3),
    ("temperature", 1, 1.0),
    ("top_p", np.float32(0.5), 0.5),
]
REFUSED: list[tuple[str, Any]] = [
    *(("stop", one) for one in (5, [5], b"a", {"a": 1})),
    *(("bad_words", one) for one in (5, [["a"]])),
    *(("stop_token_ids", one) for one in ([1.5], [True], "12", 7, {2: 1}, ["2"])),
    *(("allowed_token_ids", one) for one in ([1.5], [None], "12")),
    *(("logit_bias", one) for one in ({1.5: 1}, {"x": 1}, {"-1": 1}, {True: 1}, {5: "1"}, [5])),
    *((name, one) for name in ("top_k", "n", "min_tokens", "seed") for one in (1.0, "1", True)),
    *(("max_tokens", one) for one in (16.0, "16", True, [16])),
    *(("logprobs", one) for one in (1.0, "1")),
    *((name, one) for name in ("temperature", "top_p", "min_p") for one in ("1", True, 1j)),
    *(("repetition_penalty", one) for one in (float("nan"), "1")),
    *(("ignore_eos", one) for one in (1, "yes")),
]


@pytest.mark.parametrize(("name", "given", "known"), TAKEN)
def test_what_vllm_takes_is_taken(name: str, given: Any, known: Any) -> None:
    found = getattr(SamplingParams(**{name: given}), name)
    assert found == known
    assert type(found) is type(known)


@pytest.mark.parametrize("name", READERS)
def test_none_is_the_default(name: str) -> None:
    nothing: Any = {name: None}
    assert getattr(SamplingParams(**nothing), name) == DEFAULTS[name]


def test_none_is_no_bound_of_tokens() -> None:
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams().max_tokens == 16


@pytest.mark.parametrize(("name", "given"), REFUSED)
def test_the_rest_is_refused_by_name(name: str, given: Any) -> None:
    with pytest.raises(ChangeSomething) as refused:
        SamplingParams(**{name: given})
    assert refused.value.field == name
    assert refused.value.remedy


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(ChangeSomething) as refused:
        SamplingParams(stop_token_ids="x" * 1000)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 200


IDS = [5, 6]
TOO_LARGE = 2**31


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth - 1):
        found = {"not": found}
    return found


@pytest.mark.parametrize(
    "given",
    [IDS, tuple(IDS), np.array(IDS), np.array(IDS, np.uint8), torch.tensor(IDS), [np.int64(5), 6]],
    ids=["list", "tuple", "array", "bytes", "tensor", "numbers"],
)
@pytest.mark.parametrize("wrap", [False, True], ids=["bare", "mapping"])
def test_token_ids_are_taken(given: Any, wrap: bool) -> None:
    found = given_prompt({"prompt_token_ids": given, "prompt": None} if wrap else given)
    assert found.token_ids is not None
    assert found.token_ids.tolist() == IDS
    assert found.token_ids.dtype == np.int32


def test_texts_and_models_are_taken() -> None:
    assert given_prompt("Hi").text == "Hi"
    found = given_prompt({"prompt": "Hi", "model": "b", "images": {"a": 1}}, "images")
    assert (found.text, found.model, found.images) == ("Hi", "b", {"a": 1})
    both = given_prompt({"prompt": "Hi", "prompt_token_ids": IDS})
    assert both.text == "Hi"
    assert both.token_ids is not None


@pytest.mark.parametrize(
    ("given", "field"),
    [
        *((one, "prompt") for one in (None, 5, 1.5, True, b"Hi", {"Hi"}, range(2))),
        *((one, "prompt") for one in ([1.5], [True], [-1], [TOO_LARGE], ["5"], [None], [[5]])),
        *((np.array(one), "prompt") for one in ([1.5], [True], [-1], [TOO_LARGE], [[5]], ["5"])),
        *(({"prompt": one}, "prompt") for one in (None, 5, [1.5])),
        *(({"prompt_token_ids": one}, "prompt_token_ids") for one in ("Hi", [True], [-1], 5)),
        ({}, "prompt"),
        ({"prompt": "Hi", "model": 5}, "model"),
        ({"prompt": "Hi", "images": [1]}, "images"),
        ({"prompt": "Hi", "multi_modal_data": {}}, "multi_modal_data"),
    ],
    ids=repr,
)
def test_other_prompts_are_refused_by_field(given: Any, field: str) -> None:
    with pytest.raises(ChangeSomething) as refused:
        given_prompt(given, "images")
    assert refused.value.field == field
    assert refused.value.remedy


def test_a_schema_may_be_a_mapping() -> None:
    assert StructuredOutputs(json={"type": "object"}) == StructuredOutputs(  # type: ignore[arg-type]
        json='{"type":"object"}'
    )
    choices: Any = ["a", "b"]
    assert StructuredOutputs(choice=choices).choice == ("a", "b")
    nothing: Any = None
    assert StructuredOutputs(regex="a", json_object=nothing, choice=nothing).kind == "regex"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("json", one) for one in (5, ["a"], {"a": 1j}, nested(MAX_SCHEMA_DEPTH + 1))),
        *(("regex", one) for one in (5, b"a", ["a"])),
        *(("grammar", one) for one in (5, {"a": 1})),
        *(("json_object", one) for one in (1, "yes")),
        *(("choice", one) for one in ("abc", [5], [], {"a": 1}, 7)),
    ],
)
def test_other_forms_are_refused_by_field(name: str, value: Any) -> None:
    with pytest.raises(ChangeSomething) as refused:
        StructuredOutputs(**{name: value})
    assert refused.value.field == f"structured_outputs.{name}"
    with pytest.raises(ChangeSomething) as refused:
        StructuredOutputs(**{name: value}, named="guided")
    assert refused.value.field == "guided"


def test_beam_searches_take_what_sampling_takes() -> None:
    ids: Any = [2, 7]
    found = BeamSearchParams(np.int64(2), 4, stop_token_ids=ids)  # type: ignore[arg-type]
    assert (found.beam_width, found.stop_token_ids) == (2, (2, 7))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("beam_width", one) for one in (2.0, "2", True, None)),
        *(("max_tokens", one) for one in (4.0, "4", True, None)),
        *(("stop_token_ids", one) for one in ([1.5], "12", [True])),
        *(("length_penalty", one) for one in ("1", True, None)),
        *(("early_stopping", one) for one in (1, "always", None)),
        *(("ignore_eos", one) for one in (1, "yes")),
        *(("min_tokens", one) for one in (1.5, "1")),
        *(("temperature", one) for one in ("1", True)),
        ("logprobs", 1.5),
    ],
)
def test_other_beam_searches_are_refused_by_field(name: str, value: Any) -> None:
    given: dict[str, Any] = {"beam_width": 2, "max_tokens": 4, name: value}
    with pytest.raises(ChangeSomething) as refused:
        BeamSearchParams(**given)
    assert refused.value.field == name
