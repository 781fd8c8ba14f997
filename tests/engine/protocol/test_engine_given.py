"""Types of what users give in Python: as vLLM takes them, or refused by name."""

from typing import Any

import numpy as np
import pytest

from kvell.engine.protocol.sampling_params import DEFAULTS, READERS, SamplingParams
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
