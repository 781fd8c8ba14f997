"""Pages that are copied while a pass computes: answers are those of an engine without a buffer."""

from typing import Any

import numpy as np
import pytest
import torch

from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import build_engine
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.running.copies.copies_under_pass import PassCopies, copies_beside_passes
from kvell.engine.setup.options import EngineOptions
from kvell.memory import audit
from kvell.models.captured.passes import SlotStep
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import MIB, RequestId
from tests.engine.copying import HeldUp, copier_of, hold_up
from tests.engine.planning.drafts import answers as drafted
from tests.engine.speculating import served, words_module
from tests.models import served_together as together
from tests.models.cases import some_fast
from tests.models.harness import tiny_module
from tests.models.random_model import random_paged_model
from tests.models.served import Served, assert_all
from tests.models.served_together import Together
from tests.models.serving.buffers import PROMPTS, TEXT, ask_again, caching, force, outputs

BY_LAYER = ["Gemma3ForCausalLM", "Llama4ForCausalLM", "LlamaForCausalLM"]
WITH_STATES = ["JambaForCausalLM", "Qwen3NextForCausalLM"]
FAST = ("Gemma3ForCausalLM", "JambaForCausalLM")
COMPILED = ["LlamaForCausalLM", "Gemma3ForCausalLM", "FalconH1ForCausalLM"]


@pytest.mark.parametrize("architecture", some_fast(BY_LAYER + WITH_STATES, FAST))
def test_a_pass_waits_for_each_stage_and_answers_are_exact(architecture: str) -> None:
    """Every stage is copied only when the pass has come to wait for it."""
    expected = outputs(Served(architecture, batched=64))
    run = Served(architecture, batched=64, cpu_buffer_bytes=8 * MIB)
    force(run.engine, 1)
    mover, counts = hold_up(run.engine.runner), copier_of(run.engine.runner).counts
    assert outputs(run) == expected
    assert mover.held == counts.waits > 4
    assert counts.under_bytes > counts.before_bytes * (architecture in BY_LAYER)


@pytest.mark.parametrize("architecture", some_fast(["Gemma3ForCausalLM", "LlamaForCausalLM"], FAST))
def test_a_pass_that_did_not_wait_would_answer_otherwise(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting, all that comes in comes when the pass is over."""
    expected = outputs(Served(architecture, batched=64))
    run = Served(architecture, batched=64, cpu_buffer_bytes=8 * MIB)
    force(run.engine, 1)
    mover = hold_up(run.engine.runner)
    never_wait(mover, monkeypatch)
    assert outputs(run) != expected
    assert mover.held


def never_wait(mover: HeldUp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies under a pass go when the pass is over."""
    end = PassCopies.__exit__

    def let_all_go(copies: PassCopies, *raised: object) -> None:
        for _ in range(sum(map(len, copies.stages.values()))):
            mover.let_go()
        end(copies, *raised)

    monkeypatch.setattr(PassCopies, "wait_for", lambda *_: None)
    monkeypatch.setattr(PassCopies, "__exit__", let_all_go)


def test_where_no_processor_is_left_all_is_copied_before_the_pass() -> None:
    expected = outputs(Served("LlamaForCausalLM", batched=64))
    run = Served("LlamaForCausalLM", batched=64, cpu_buffer_bytes=8 * MIB, copies_under_pass=False)
    force(run.engine, 1)
    assert outputs(run) == expected
    counts = copier_of(run.engine.runner).counts
    assert counts.before_bytes > 0
    assert counts.under_bytes == counts.waits == 0


@pytest.mark.parametrize("processors", [1, 2, 3])
def test_copies_are_under_the_pass_where_it_leaves_a_processor_free(
    processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert copies_beside_passes(None) is (processors > 2)
    assert copies_beside_passes(wanted=True)
    assert not copies_beside_passes(wanted=False)


def test_a_pass_that_fails_leaves_memory_lying_still(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Served("LlamaForCausalLM", batched=64, cpu_buffer_bytes=8 * MIB)
    force(run.engine, 1)
    ended: list[bool] = []
    seams, end = PassCopies.seams, PassCopies.__exit__

    def broken(copies: PassCopies, model: str) -> object:
        seams(copies, model)
        raise ValueError("broken pass")

    def noting(copies: PassCopies, *raised: object) -> None:
        end(copies, *raised)
        ended.append(copies.made.done())

    monkeypatch.setattr(PassCopies, "seams", broken)
    monkeypatch.setattr(PassCopies, "__exit__", noting)
    tokens = outputs(run)
    assert any(len(tokens.get(str(number), [])) < 14 for number in range(len(PROMPTS)))
    assert str(run.engine.failed_steps.last) == "broken pass"
    assert ended and all(ended)


def test_a_copy_that_fails_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass neither waits for ever nor answers from pages that never came."""
    run = Served("LlamaForCausalLM", batched=64, cpu_buffer_bytes=8 * MIB)
    force(run.engine, 1)
    mover = copier_of(run.engine.runner).mover

    def broken(*_: object, **__: object) -> None:
        raise OSError("broken memory")

    monkeypatch.setattr(mover, "move_parts", broken)
    with pytest.raises(OSError, match="broken memory"):
        outputs(run)


def test_a_step_that_swaps_nothing_has_no_callbacks() -> None:
    run = Served("LlamaForCausalLM", batched=64, cpu_buffer_bytes=8 * MIB)
    seen: list[LayerCallbacks | None] = []
    forward = run.recorder.model.forward

    def noting(
        batch: ForwardBatch | SlotStep, callbacks: LayerCallbacks | None = None
    ) -> torch.Tensor:
        seen.append(callbacks)
        return forward(batch, callbacks)

    run.recorder.model.forward = noting  # type: ignore[method-assign]
    outputs(run)
    assert seen
    assert set(seen) == {None}
    force(run.engine, 1)
    outputs(run)
    assert set(map(type, seen)) > {type(None)}
    assert copier_of(run.engine.runner).counts.under_bytes > 0


def test_prefixes_of_the_buffer_come_in_under_the_pass() -> None:
    run, _ = caching("Gemma3ForCausalLM")
    mover = hold_up(run.engine.runner)
    assert ask_again(run, TEXT) >= len(TEXT)
    assert copier_of(run.engine.runner).counts.under_bytes > 0
    assert mover.held > 0
    assert_all(run)


@pytest.mark.parametrize("pair", [("Gemma3ForCausalLM", "LlamaForCausalLM")])
def test_each_of_several_models_waits_for_its_own_pages(pair: tuple[str, str]) -> None:
    """In a step of both, the second one's stages are copied behind the first one's."""
    run = Together(*pair, batched=64, cpu_buffer_bytes=8 * MIB)
    force(run.engine, 1)
    runner = run.watched.runner
    mover = hold_up(runner)
    for number, prompt in enumerate(PROMPTS):
        run.submit(str(number), f"m{number % 2}", prompt, 14)
    run.run()
    together.assert_all(run)
    fetched = [
        {work.spec.model for work in plan.work}
        for plan in run.watched.plans
        if len(plan.fetches) or len(plan.offloads)
    ]
    assert {"m0", "m1"} in fetched
    assert mover.held == copier_of(runner).counts.waits > 4


def test_beside_a_draft_model_all_is_copied_before_the_pass() -> None:
    module = words_module("LlamaForCausalLM")
    run = served(module, 3, module, cpu_buffer_bytes=16 * MIB)
    force(run.engine, 1)
    drafted(run)
    counts = copier_of(run.runner).counts
    assert counts.before_bytes > 0
    assert counts.under_bytes == counts.waits == 0


def compiled(architecture: str) -> PagedModel:
    kernels = choose_kernels(torch.device("cpu"))
    if kernels.name != "native":
        pytest.skip("no compiler here: no compiled pass")
    model = random_paged_model(tiny_module(architecture).config, kernels)
    assert model.fused is not None
    return model


def answers(engine: Engine) -> dict[str, list[int]]:
    tokens = dict[str, list[int]]()
    greedy = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        ids = np.asarray(prompt, "<i4").tobytes()
        assert is_accepted(engine.handle(Submit(RequestSpec(RequestId(str(number)), ids, greedy))))
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Tokens):
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
        assert audit(engine.core.memory.layout, engine.core.memory.snapshot()) == []
    return tokens


def engine_of(model: PagedModel, **more: Any) -> Engine:
    more = {"copies_under_pass": True} | more
    return build_engine(
        model,
        "tiny",
        EngineOptions(
            kv_memory_bytes=8 * MIB, max_model_len=256, max_num_batched_tokens=64, **more
        ),
    )


@pytest.mark.parametrize("architecture", some_fast(COMPILED, (*FAST, "FalconH1ForCausalLM")))
def test_a_compiled_pass_waits_too(architecture: str) -> None:
    model = compiled(architecture)
    expected = answers(engine_of(model))
    engine = engine_of(model, cpu_buffer_bytes=8 * MIB)
    force(engine, 3)
    mover, counts = hold_up(engine.runner), copier_of(engine.runner).counts
    assert answers(engine) == expected
    assert mover.held == counts.waits > 4


def test_a_compiled_pass_that_did_not_wait_would_answer_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = compiled("LlamaForCausalLM")
    expected = answers(engine_of(model))
    engine = engine_of(model, cpu_buffer_bytes=8 * MIB)
    force(engine, 3)
    never_wait(hold_up(engine.runner), monkeypatch)
    assert answers(engine) != expected
