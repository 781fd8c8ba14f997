"""Prompts, forms of answers and beam searches as Python callers give them."""

from typing import Any

import numpy as np
import pytest
import torch

from kvell.engine.protocol.given import given_prompt
from kvell.engine.protocol.structured_outputs import MAX_SCHEMA_DEPTH, StructuredOutputs
from kvell.engine.requests.beam_search import BeamSearchParams
from kvell.errors import ChangeSomething

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
