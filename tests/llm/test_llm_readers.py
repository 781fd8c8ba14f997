"""Calls of one LLM beside each other, and calls that are interrupted."""

import gc
import threading
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.running.runner import Runner
from kvell.llm import LLM
from kvell.vocabulary import MIB

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ("Once upon a time", "The sky is", "The capital of France is")


class Interrupted:
    """A runner that raises in place of one step."""

    def __init__(self, runner: Runner, step: int, failure: BaseException) -> None:
        self._runner, self._step, self._failure = runner, step, failure

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step == self._step:
            raise self._failure
        return self._runner.run(plan)


@pytest.fixture(scope="module", params=[False, True], ids=["in-turn", "ahead"])
def llm(shallow_path: Path, request: pytest.FixtureRequest) -> LLM:
    return LLM(
        "smollm2",
        cache_dir=shallow_path.parent,
        kv_memory_bytes=16 * MIB,
        dtype="float32",
        async_scheduling=request.param,
    )


@pytest.fixture(scope="module")
def texts(llm: LLM) -> list[str]:
    return [output.text for output in llm.generate(PROMPTS, GREEDY, sequential=True)]


def assert_clean(llm: LLM) -> None:
    assert llm.engine.core.audit() == ()
    assert llm.engine.core.memory.snapshot().holders == ()
    assert not llm.engine.core.has_requests


def test_a_stream_beside_a_call_is_whole(llm: LLM, texts: list[str]) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    parts = [next(stream)]
    assert [one.text for one in llm.generate(PROMPTS[1:], GREEDY)] == texts[1:]
    parts += stream
    assert "".join(parts) == texts[0]
    assert_clean(llm)


def test_streams_that_are_read_in_turn_are_whole(llm: LLM, texts: list[str]) -> None:
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    rows = list(zip_longest(*streams, fillvalue=""))
    assert ["".join(column) for column in zip(*rows, strict=True)] == texts
    assert_clean(llm)


def test_threads_may_call_at_the_same_time(llm: LLM, texts: list[str]) -> None:
    answers: dict[int, str] = {}

    def ask(index: int) -> None:
        if index % 2:
            answers[index] = "".join(llm.stream(PROMPTS[index], GREEDY))
        else:
            answers[index] = llm.generate(PROMPTS[index], GREEDY)[0].text

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[index] for index in range(len(PROMPTS))] == texts
    assert_clean(llm)


def test_a_stream_that_is_left_is_cancelled(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    del stream
    gc.collect()
    list(llm.stream(PROMPTS[1], GREEDY))
    assert_clean(llm)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_call_leaves_the_model_usable(
    llm: LLM, texts: list[str], kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    for later in range(1, 4):
        step = int(llm.engine.core.step) + later
        with monkeypatch.context() as patched:
            patched.setattr(llm.engine, "runner", Interrupted(llm.engine.runner, step, kind()))
            with pytest.raises(kind):
                llm.generate(PROMPTS, GREEDY)
        assert_clean(llm)
        assert [one.text for one in llm.generate(PROMPTS, GREEDY)] == texts


def test_a_stream_beside_a_step_that_is_interrupted_ends_with_that_exception(
    llm: LLM, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream: Iterator[str] = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with monkeypatch.context() as patched:
        step = int(llm.engine.core.step) + 1
        failing = Interrupted(llm.engine.runner, step, KeyboardInterrupt())
        patched.setattr(llm.engine, "runner", failing)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert "".join(llm.stream(PROMPTS[0], GREEDY)) == texts[0]
    assert_clean(llm)
