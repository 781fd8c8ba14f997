"""From tokens to text: stop strings, silent tokens, whole characters, and how a request ends."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.logprobs import KeptLogprobs, TokenLogprobs
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething, KvellError, RequestFailed, TryLater
from kvell.front.front import Front
from kvell.front.request_log import Output
from kvell.models.families.draft_model import check_draft
from kvell.models.loading.named_models import NamedModel
from kvell.models.sources.progress import quiet
from kvell.models.text.answer_text import AnswerText
from kvell.models.text.gap_tokens import gap_tokens
from kvell.models.text.tokenizer import tokenizer_or_none
from kvell.server.text.named_texts import texts_of
from kvell.server.text.text_stream import (
    RequestRefused,
    TextDelta,
    Usage,
    answer_text,
    text_deltas,
)
from kvell.testing.instance import EOS_TOKEN, ByteText
from tests.operations import operations
from tests.server.text.scripts import Script, deltas, ended, spec


def written(data: bytes, cuts: list[int], sampling: SamplingParams) -> tuple[str, AnswerText]:
    writer = answer_text(ByteText(), spec(sampling))
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    text = "".join(writer.push(tuple(data[start:end])) for start, end in pairwise(bounds))
    return text + writer.finish(), writer


cut_lists = st.lists(st.integers(0, 1000), max_size=6)
words = st.text(alphabet="abé🙂", max_size=30)


@given(words, cut_lists)
def test_text_does_not_depend_on_how_tokens_arrive(text: str, cuts: list[int]) -> None:
    assert written(text.encode(), cuts, SamplingParams())[0] == text


@given(words, st.lists(st.text("abé🙂", min_size=1, max_size=3), min_size=1, max_size=3), cut_lists)
def test_text_ends_before_the_first_stop_string(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    shown, writer = written(text.encode(), cuts, SamplingParams(stop=tuple(stop)))
    # Text grows character by character, so the stop string that is whole first decides;
    # of two that end at the same character the longer begins first.
    found = [(at + len(each), at) for each in stop if (at := text.find(each)) >= 0]
    assert writer.stopped == bool(found)
    assert shown == (text[: min(found)[1]] if found else text)


def test_tokens_are_counted_up_to_the_one_that_completed_the_stop_string() -> None:
    _, writer = written(b"hello world, and more", [], SamplingParams(stop=("world",)))
    assert writer.token_count == len(b"hello world")
    assert writer.push((65,)) == ""
    assert writer.token_count == len(b"hello world")


def test_end_of_sequence_and_stop_tokens_are_counted_but_not_shown() -> None:
    data = bytes([*b"ab", EOS_TOKEN])
    shown, writer = written(data, [], SamplingParams())
    assert (shown, writer.token_count) == ("ab", 3)
    shown, _ = written(b"abX", [], SamplingParams(stop_token_ids=(ord("X"),)))
    assert shown == "ab"


def test_end_of_sequence_is_text_when_it_is_ignored() -> None:
    shown, _ = written(bytes([65, EOS_TOKEN, 66]), [], SamplingParams(ignore_eos=True))
    assert shown == "A\0B"


def test_an_unfinished_character_is_shown_as_broken_at_the_end_only() -> None:
    assert written("é".encode()[:1], [], SamplingParams())[0] == "\ufffd"
    assert answer_text(ByteText(), spec()).push(tuple("é".encode()[:1])) == ""


def test_deltas_end_with_reason_and_usage() -> None:
    script = Script(Output((97, 98)), Output((99,)), ended("length", cached=2))
    assert deltas(script) == [
        TextDelta("ab", token_ids=(97, 98)),
        TextDelta("c", token_ids=(99,)),
        TextDelta("", "length", Usage(3, 3, 2)),
    ]
    assert script.left


def test_a_stop_string_is_told_to_the_front_and_reported_as_stop() -> None:
    # What was on its way when the front heard of it is not shown.
    script = Script(Output(tuple(b"hi STOP")), Output(tuple(b"late")), ended("stop", cached=1))
    found = deltas(script, SamplingParams(stop=("STOP",)))
    assert "".join(delta.text for delta in found) == "hi "
    assert found[-1].finish_reason == "stop"
    assert found[-1].usage == Usage(3, 7, 1)
    assert set(script.stopped) == {"r"}


def test_a_stop_string_in_the_last_tokens_wins_over_length() -> None:
    last = Output(tuple(b"hi STOP"), ended("length").finished)
    assert deltas(Script(last), SamplingParams(stop=("STOP",))) == [
        TextDelta("hi ", "stop", Usage(3, 7, 0), tuple(b"hi STOP"), stop_reason="STOP")
    ]


@pytest.mark.parametrize(
    ("asked", "data", "text", "reason"),
    [
        ({"stop": ("lo", "el")}, b"hello", "h", "el"),
        ({"stop_token_ids": (ord("l"),)}, b"hel", "he", ord("l")),
        ({}, bytes([104, EOS_TOKEN]), "h", None),
        ({"stop_token_ids": (EOS_TOKEN,)}, bytes([104, EOS_TOKEN]), "h", None),
        (
            {"stop_token_ids": (EOS_TOKEN,), "ignore_eos": True},
            bytes([104, EOS_TOKEN]),
            "h",
            EOS_TOKEN,
        ),
    ],
)
def test_what_ended_an_answer_is_told_and_not_shown(
    asked: dict[str, Any], data: bytes, text: str, reason: str | int | None
) -> None:
    [only] = deltas(Script(Output(tuple(data), ended("stop").finished)), SamplingParams(**asked))
    assert (only.text, only.finish_reason, only.stop_reason) == (text, "stop", reason)
    shown = SamplingParams(**asked, include_stop_str_in_output=True)
    [only] = deltas(Script(Output(tuple(data), ended("stop").finished)), shown)
    end = reason if isinstance(reason, str) else chr(data[-1])
    assert (only.text, only.stop_reason) == (text + end, reason)


def test_an_answer_at_its_limit_was_ended_by_nothing_though_its_last_token_is_a_stop() -> None:
    script = Script(Output(tuple(b"ab"), ended("length").finished))
    [only] = deltas(script, SamplingParams(stop_token_ids=(ord("b"),)))
    assert (only.finish_reason, only.stop_reason) == ("length", None)


def silent(tokens: int) -> Script:
    """An answer of tokens without text, each with its likeliest tokens."""
    likely = TokenLogprobs(-1.0, 1, ((1, -1.0), (2, -2.0)))
    outputs = [Output((EOS_TOKEN,), None, KeptLogprobs([likely])) for _ in range(tokens)]
    return Script(*outputs, ended("length"))


def test_tokens_without_text_are_appended_and_not_copied_for_each_token() -> None:
    counted = [operations(lambda n=n: deltas(silent(n))) for n in (200, 400)]  # type: ignore[misc]
    assert counted[1] < 2.2 * counted[0]
    (last,) = deltas(silent(300))
    assert (len(last.token_ids), len(last.logprobs)) == (300, 300)


def test_tokens_without_text_yet_are_told_with_the_text() -> None:
    first, second = "é".encode()
    script = Script(Output((97, first)), Output((second,)), ended("length"))
    assert [(d.text, d.token_ids) for d in deltas(script)] == [
        ("a", (97, first)),
        ("é", (second,)),
        ("", ()),
    ]
    script = Script(Output((first,)), Output((second,)), ended("length"))
    assert [(d.text, d.token_ids) for d in deltas(script)] == [("é", (first, second)), ("", ())]


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    script = Script(Output(tuple(b"no ST")), ended("length"))
    found = deltas(script, SamplingParams(stop=("STOP",)))
    assert "".join(delta.text for delta in found) == "no ST"


def test_a_death_after_the_stop_string_changes_nothing() -> None:
    script = Script(Output(tuple(b"a STOP")), ended("error", "it died"))
    last = deltas(script, SamplingParams(stop=("STOP",)))[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", "STOP")


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (ended("error", "it died"), RequestFailed),
        (ended("cancelled"), RequestFailed),
        (ended("refused", "draining", try_later=True), TryLater),
        (ended("refused", "can never fit"), RequestRefused),
        (ended("error", "excludes all", field="bad_words"), RequestRefused),
    ],
)
def test_other_ends_are_errors_of_their_family(output: Output, kind: type[KvellError]) -> None:
    with pytest.raises(KvellError) as caught:
        deltas(Script(Output((97,)), output))
    assert type(caught.value) is kind
    assert output.finished is not None
    assert output.finished.message in str(caught.value)


async def test_leaving_the_deltas_leaves_the_front() -> None:
    script = Script(Output((97,)), Output((98,)), ended("length"))
    stream = text_deltas(cast(Front, script), ByteText(), spec())
    await anext(stream)
    await stream.aclose()
    assert script.left


QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
MISTRAL = ["[SUFFIX]", "[PREFIX]"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (QWEN, [0, 50, 51, 1, 60, 2]),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], [0, 50, 51, 1, 60, 2]),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], [0, 50, 51, 1, 60, 2]),
        (MISTRAL, [0, 60, 1, 50, 51]),
    ],
)
def test_texts_and_marks_are_in_the_familys_order(names: list[str], expected: list[int]) -> None:
    ids = {name: index for index, name in enumerate([*names, "<|endoftext|>"])}
    form = gap_tokens(ids.get)
    assert form is not None
    prompt = form.prompt(np.array([50, 51], np.int32), np.array([60], np.int32))
    assert prompt.tolist() == expected and prompt.dtype == np.int32
    assert form.end_token_ids == tuple(range(len(names) + 1))


@pytest.mark.parametrize("names", [[], QWEN[:2], [*QWEN[:2], "<fim_middle>"], MISTRAL[:1]])
def test_a_part_of_the_marks_is_none(names: list[str]) -> None:
    assert gap_tokens({name: index for index, name in enumerate(names)}.get) is None


OVERRIDES = json.dumps({"vocab_size": 49_200, "eos_token_id": 7})


@pytest.fixture
def model(smollm2_path: Path, tmp_path: Path) -> Path:
    """A directory without recommended ends of a text, so that those of its config count."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_path / name, tmp_path)
    return tmp_path


def test_the_first_models_text_follows_its_overrides(model: Path, smollm2_path: Path) -> None:
    models = f"one={model}", f"two={smollm2_path}"
    first, other = texts_of(models, model, quiet, hf_overrides=OVERRIDES).load().models
    assert (first.vocab_size, other.vocab_size) == (49_200, 49_152)
    assert 7 in first.eos_token_ids and 7 not in other.eos_token_ids


def test_ends_of_a_text_follow_overrides_with_a_tokenizer_and_without(model: Path) -> None:
    named, plain = NamedModel("m", model, OVERRIDES), NamedModel("m", model)
    assert 7 in named.eos_token_ids and 7 in named.tokenizer.eos_token_ids
    assert 7 not in plain.eos_token_ids
    (model / "tokenizer.json").unlink()
    assert tokenizer_or_none(model, OVERRIDES).eos_token_ids == {7}
    (model / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert tokenizer_or_none(model, OVERRIDES).eos_token_ids == {9}


def test_a_tokenizer_may_be_elsewhere(model: Path, smollm2_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    named, other = f"one={model}", f"two={smollm2_path}"
    first, _ = texts_of((named, other), model, quiet, tokenizer=str(smollm2_path)).load().models
    own, apart = tokenizer_or_none(smollm2_path), NamedModel("m", model, None, smollm2_path)
    assert first.eos_token_ids == own.eos_token_ids == apart.eos_token_ids
    assert apart.tokenizer.encode("a page").tolist() == own.encode("a page").tolist()
    assert apart.tokenizer_json() == (smollm2_path / "tokenizer.json").read_text()


def test_a_tokenizer_that_is_not_there_is_named(model: Path) -> None:
    with pytest.raises(ChangeSomething, match=r"^tokenizer=/none: there is no such directory"):
        texts_of((str(model),), model, quiet, tokenizer="/none")


def test_a_draft_model_is_compared_with_the_overridden_config(model: Path) -> None:
    tokenizer = tokenizer_or_none(model)
    check_draft(model, model, tokenizer, "draft")
    with pytest.raises(ChangeSomething, match="the model one of 49200"):
        check_draft(model, model, tokenizer, "draft", OVERRIDES)
