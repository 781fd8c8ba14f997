"""Random-weight shapes through the whole engine, exact by teacher-forced logits.

The oracle is transformers' own eager model over each request's prompt and answer;
every logits row from which the engine drew a token is compared with the oracle's.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.memory import plan_layout
from kvell.models.config.description import describe
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import KIB, RequestId
from tests.llm.exactness import Recorder, model_of, prompts_with_shared_halves, small_engine
from tests.models.harness import tiny_module

SHAPES = ("LlamaForCausalLM", "Gemma3ForCausalLM")
"""Gemma 3 has five sliding layers (window 9) to one full; prompts are longer than that."""
OUTPUT_TOKENS = 36


@dataclass
class Run:
    """What an engine answered, and the logits each token was drawn from."""

    outputs: dict[str, list[int]]
    logits: dict[str, dict[int, torch.Tensor]]
    finished: dict[str, Finished]


def serve(engine: Engine, recorder: Recorder, prompts: dict[str, list[int]], alone: bool) -> Run:
    run = Run({name: [] for name in prompts}, {name: {} for name in prompts}, {})
    batches = [[name] for name in prompts] if alone else [list(prompts)]
    for batch in batches:
        for name in batch:
            params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            ids = np.asarray(prompts[name], "<i4").tobytes()
            assert is_accepted(engine.handle(Submit(RequestSpec(RequestId(name), ids, params))))
        while engine.has_work():
            events = engine.step()
            drawn = [event for event in events if isinstance(event, Tokens)]
            for event, row in zip(drawn, recorder.logits, strict=True):
                run.outputs[event.request_id] += event.token_ids
                run.logits[event.request_id][event.first_index] = row
            run.finished |= {e.request_id: e for e in events if isinstance(e, Finished)}
    return run


def assert_teacher_forced(architecture: str, prompts: dict[str, list[int]], run: Run) -> None:
    """Logits within 1e-4 of the largest; greedy tokens the oracle's own but for near ties."""
    ties = total = 0
    for name, prompt in prompts.items():
        output = run.outputs[name]
        assert len(output) == OUTPUT_TOKENS
        with torch.inference_mode():
            logits = tiny_module(architecture)(torch.tensor([prompt + output])).logits[0]
        for index, token in enumerate(output):
            expected = logits[len(prompt) - 1 + index]
            bound = 1e-4 * float(expected.abs().max())
            assert float((run.logits[name][index] - expected).abs().max()) <= bound
            best, second = expected.topk(2).values.tolist()
            ties += best - second < bound
            total += 1
            assert token == int(expected.argmax()) or best - second < bound
    assert ties < 0.005 * total
    assert len({t for output in run.outputs.values() for t in output}) > total // 4


SOON = {
    ("LlamaForCausalLM", 7, False),
    ("Gemma3ForCausalLM", 256, False),
    ("Gemma3ForCausalLM", 7, True),
}


@pytest.mark.parametrize(
    ("architecture", "batched", "alone"),
    [
        pytest.param(*case, marks=() if case in SOON else pytest.mark.long)
        for case in itertools.product(SHAPES, (7, 256), (False, True))
    ],
)
def test_answers_are_exact(architecture: str, batched: int, alone: bool) -> None:
    prompts = prompts_with_shared_halves(8)
    engine, recorder = small_engine(architecture, 4096, batched)
    run = serve(engine, recorder, prompts, alone)
    assert_teacher_forced(architecture, prompts, run)
    hits = [run.finished[name].cached_tokens for name in list(prompts)[1::2]]
    assert hits == [32] * 4, "the second half of the prompts shares two pages with the first"


@pytest.mark.parametrize(
    ("architecture", "large_pages"),
    [
        pytest.param("LlamaForCausalLM", 14, marks=pytest.mark.long),
        ("Gemma3ForCausalLM", 21),
    ],
)
def test_answers_are_exact_when_requests_are_preempted(architecture: str, large_pages: int) -> None:
    """Pools in which growth runs out of pages after the prompts were let in."""
    prompts = prompts_with_shared_halves(8)
    layout = plan_layout(describe(tiny_module(architecture).config, 4).layers, 4096 * KIB)
    pool_kib = -(-large_pages * layout.large_page_bytes // KIB)
    engine, recorder = small_engine(architecture, pool_kib, 256)
    run = serve(engine, recorder, prompts, alone=False)
    assert_teacher_forced(architecture, prompts, run)
    assert sum(event.preemptions for event in run.finished.values()) > 0


def test_one_page_size_for_all_layers_gives_the_same_answers() -> None:
    prompts = prompts_with_shared_halves(4)
    recorder = Recorder(model_of("Gemma3ForCausalLM"))
    options = EngineOptions(
        kv_memory_bytes=4096 * KIB,
        max_model_len=96,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        manager="paged",
    )
    engine = build_engine(recorder, "gemma3", options)  # type: ignore[arg-type]
    assert_teacher_forced("Gemma3ForCausalLM", prompts, serve(engine, recorder, prompts, False))
