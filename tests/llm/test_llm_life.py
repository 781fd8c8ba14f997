"""The beginning and the end of an LLM: sizes, names in errors, seeds, and what closing frees."""

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from kvell import LLM, ChangeSomething, SamplingParams
from kvell.serving.readers import EngineEnded

SAMPLED = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
PROMPTS = ["Once upon a time", "The sky is"]
SCHEMA: Any = {"structured_outputs": {"json": '{"type": "integer"}'}}


def opened(path: Path, **settings: Any) -> LLM:
    return LLM("smollm2", cache_dir=path.parent, kv_memory="16MiB", dtype="float32", **settings)


def sampled(llm: LLM) -> list[list[int]]:
    """The tokens of answers to two prompts, of two choices of one prompt, and of a stream."""
    several = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, n=2)
    outputs = [*llm.generate(PROMPTS, SAMPLED), *llm.generate(PROMPTS[0], several)]
    texts = [list(map(ord, "".join(llm.stream(PROMPTS[0], SAMPLED))))]
    return [list(answer.token_ids) for output in outputs for answer in output.outputs] + texts


@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
def test_a_closed_one_frees_its_engine_and_refuses_calls(shallow_path: Path, ahead: bool) -> None:
    with opened(shallow_path, async_scheduling=ahead) as llm:
        engine, threads = weakref.ref(llm.engine), threading.active_count()
        pool = weakref.ref(llm.engine.runner)
        first = llm.generate(PROMPTS, SamplingParams(max_tokens=4, temperature=0))
        assert [len(output.outputs[0].token_ids) for output in first] == [4, 4]
        stream = llm.stream(PROMPTS[0], SAMPLED)
        assert next(stream)
    assert engine() is None
    assert pool() is None
    assert threading.active_count() < threads + ahead
    llm.close()
    with pytest.raises(EngineEnded):
        next(stream)
    for call in (
        lambda: llm.generate(PROMPTS),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: next(llm.stream(PROMPTS[0])),
        lambda: llm.embed(PROMPTS),
        llm.reset_prefix_cache,
        lambda: llm.contract,
    ):
        with pytest.raises(EngineEnded, match="this LLM is closed; make a new one"):
            call()


def test_requests_without_a_seed_sample_alike_with_the_same_seed(shallow_path: Path) -> None:
    answers = []
    for seed in (5, 5, 6):
        with opened(shallow_path, seed=seed) as llm:
            answers.append(sampled(llm))
    assert answers[0] == answers[1] != answers[2]
    assert answers[0][0] != answers[0][2] != answers[0][3]


def test_arguments_that_cannot_be_used_name_the_class() -> None:
    with pytest.raises(
        TypeError, match=r"^kv_memory_byte=1: is not .* of LLM; did you mean kv_mem"
    ):
        LLM("smollm2", kv_memory_byte=1)
    with pytest.raises(ChangeSomething, match="seed=-3: must be between 0 and"):
        LLM("smollm2", seed=-3)
