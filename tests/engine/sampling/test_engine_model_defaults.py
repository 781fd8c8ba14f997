"""Recommended sampling: what is taken of a model's ``generation_config.json``."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.sampling.model_defaults import (
    NEUTRAL,
    find_recommended,
    limit_answer,
    sampling_defaults,
)
from kvell.errors import ChangeSomething

FULL: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
}


def write(path: Path, **fields: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(fields))
    return path


def test_vllms_fields_are_taken_and_others_left(tmp_path: Path) -> None:
    path = write(tmp_path, **FULL, do_sample=True, eos_token_id=[1], max_length=20, top_h=None)
    expected = {**FULL, "max_tokens": FULL["max_new_tokens"]}
    del expected["max_new_tokens"]
    found = sampling_defaults(path)
    assert find_recommended(found) == expected
    assert found == SamplingParams(**expected)
    assert limit_answer(found) == found


def test_nothing_is_recommended_without_a_file_or_where_nobody_wants_it(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == NEUTRAL
    assert sampling_defaults(write(tmp_path, temperature=None)) == NEUTRAL
    assert sampling_defaults(write(tmp_path, **FULL), "vllm") == NEUTRAL
    assert find_recommended(NEUTRAL) == {}
    assert limit_answer(NEUTRAL) == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", "warm"),
        ("top_p", 0.0),
        ("top_k", 1.5),
        ("min_p", 2),
        ("repetition_penalty", True),
        ("max_new_tokens", 0),
        ("max_new_tokens", "many"),
    ],
)
def test_what_cannot_be_sampled_by_is_refused_with_the_file_and_a_way_out(
    tmp_path: Path, field: str, value: Any
) -> None:
    with pytest.raises(ChangeSomething) as told:
        sampling_defaults(write(tmp_path, **{field: value}))
    assert told.value.field == str(tmp_path / "generation_config.json")
    assert str(told.value.value).startswith(f"{field}: ")
    assert "--generation-config vllm" in told.value.remedy
