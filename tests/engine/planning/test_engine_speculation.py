"""Draft tokens change how many tokens a step yields, never which: real models, random weights."""

from dataclasses import replace

import pytest
import torch

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.models.loading.random_weights import random_module
from tests.engine.planning.drafts import answers, assert_drafted_both_ways, draft_of, plain
from tests.engine.speculating import (
    GREEDY,
    SEEDED,
    WORDS,
    Served,
    prompts,
    served,
    words_module,
)
from tests.models.cases import covering, long_unless, some_fast
from tests.models.harness import tiny_config

ATTENDING = ("LlamaForCausalLM", "Gemma3ForCausalLM", "Llama4ForCausalLM", "DeepseekV3ForCausalLM")
STATES = (
    "JambaForCausalLM",
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "Qwen3NextForCausalLM",
    "Lfm2ForCausalLM",
    "Mamba2ForCausalLM",
)
FAMILIES = (*ATTENDING, *STATES)
SOME = ("Gemma3ForCausalLM", "JambaForCausalLM")
LLAMA = "LlamaForCausalLM"
PAIRS = (
    *((name, "blurred") for name in FAMILIES),
    ("LlamaForCausalLM", "Gemma3ForCausalLM"),
    ("LlamaForCausalLM", "JambaForCausalLM"),
    ("Gemma3ForCausalLM", LLAMA),
    ("Llama4ForCausalLM", LLAMA),
    ("JambaForCausalLM", LLAMA),
    ("Qwen3NextForCausalLM", "Mamba2ForCausalLM"),
)
"""Pairs of a model and its draft model; *blurred* is the model itself with noise."""
FAST_PAIRS = (PAIRS[0], (LLAMA, "JambaForCausalLM"))

LARGE_PAGES = {
    ("Gemma3ForCausalLM", ""): 12,
    ("Gemma3ForCausalLM", "blurred"): 24,
    ("JambaForCausalLM", ""): 12,
    ("JambaForCausalLM", "blurred"): 24,
}
"""Pools in which requests of a wave are preempted."""

LONGER = replace(GREEDY, max_tokens=28)


def assert_vary(outputs: dict[str, list[int]]) -> None:
    assert len({tuple(output) for output in outputs.values()}) > len(outputs) // 2
    assert len({token for output in outputs.values() for token in output}) > 6


@pytest.mark.parametrize(
    ("architecture", "sampling"),
    [
        *(pytest.param(name, GREEDY, marks=long_unless(name == SOME[0])) for name in FAMILIES),
        *(pytest.param(name, SEEDED, marks=long_unless(name == SOME[1])) for name in SOME),
    ],
)
def test_looked_up_draft_tokens_change_no_token(
    architecture: str, sampling: SamplingParams
) -> None:
    drafting, alone = served(words_module(architecture), 4), plain(architecture, sampling)
    assert_vary(alone.outputs)
    assert answers(drafting, sampling) == alone.outputs
    assert_drafted_both_ways(drafting)
    assert len(drafting.plans) < len(alone.plans)
    assert drafting.stats.prefix_cache_hits > 0


@covering({"architecture": SOME, "draft": ["", "blurred"]}, together=1)
def test_nor_in_little_memory_and_small_chunks(architecture: str, draft: str) -> None:
    """Requests are preempted and prefilled in chunks, beside draft tokens."""
    module = words_module(architecture)
    drafter = draft_of(module, draft) if draft else None
    kv_bytes = served(module, 3, drafter).layout.large_page_bytes * LARGE_PAGES[architecture, draft]
    tight = served(module, 3, drafter, kv_bytes=kv_bytes, batched=17)
    assert answers(tight, LONGER) == plain(architecture, LONGER).outputs
    assert_drafted_both_ways(tight)
    assert tight.stats.preemptions > 0
    assert any(w.count > 1 and not w.samples for plan in tight.plans for w in plan.work)


@pytest.mark.parametrize(
    ("architecture", "draft", "sampling"),
    [
        *(pytest.param(*pair, GREEDY, marks=long_unless(pair in FAST_PAIRS)) for pair in PAIRS),
        *(
            pytest.param(name, "blurred", SEEDED, marks=long_unless(name == SOME[0]))
            for name in SOME
        ),
    ],
)
def test_a_draft_models_draft_tokens_change_no_token(
    architecture: str, draft: str, sampling: SamplingParams
) -> None:
    module = words_module(architecture)
    drafting = served(module, 3, draft_of(module, draft))
    assert answers(drafting, sampling) == plain(architecture, sampling).outputs
    assert_drafted_both_ways(drafting)
    assert drafting.stats.prefix_cache_hits > 0


@pytest.mark.parametrize("architecture", some_fast(FAMILIES, ["Qwen3NextForCausalLM"]))
def test_a_model_that_drafts_for_itself_is_always_right(architecture: str) -> None:
    """It reads from its own pages what the model would have read, hits included."""
    module = words_module(architecture)
    drafting, alone = served(module, 3, module), plain(architecture)
    assert answers(drafting) == alone.outputs
    stats = drafting.stats
    assert stats.spec_decode_accepted_tokens == stats.spec_decode_draft_tokens > 0
    assert stats.prefix_cache_hits > 0
    assert len(drafting.plans) < len(alone.plans) / 2


def test_what_a_draft_model_reads_is_what_it_wrote() -> None:
    """With its pages spoilt, it drafts wrong, but tokens stay. With the model's, tokens change."""
    module = words_module("LlamaForCausalLM")
    expected = plain("LlamaForCausalLM").outputs
    prompt = {f"hit-{name}": tokens for name, tokens in prompts(1, 0).items()}
    right, spoilt, lost = (served(module, 3, module) for _ in range(3))
    assert [answers(run) for run in (right, spoilt, lost)] == [expected] * 3
    spoil(spoilt, is_draft=True)
    spoil(lost, is_draft=False)
    before = [run.stats.spec_decode_accepted_tokens for run in (right, spoilt)]
    for run in (right, spoilt, lost):
        run.ask(prompt, GREEDY)
    assert spoilt.outputs == right.outputs != lost.outputs
    after = [run.stats.spec_decode_accepted_tokens for run in (right, spoilt)]
    assert after[0] - before[0] > after[1] - before[1]
    assert right.ended["hit-q0-0"].cached_tokens > 0


def spoil(run: Served, *, is_draft: bool) -> None:
    """Overwrite the cached keys and values of one of the models."""
    for index in run.layout.indices_of(is_draft=is_draft):
        group = run.layout.groups[index]
        named = [e for e in run.engine.core.memory.snapshot().index if e.group == index]
        assert named
        for entry in named:
            start = entry.page * group.page_stride_bytes
            page = run.pool[start : start + group.page_bytes].view(torch.float32)
            page.neg_()


@pytest.mark.parametrize("draft", [None, "LlamaForCausalLM"])
def test_a_request_that_is_cancelled_or_stopped_among_draft_tokens_ends_there(
    draft: str | None,
) -> None:
    module = words_module("LlamaForCausalLM")
    expected = plain("LlamaForCausalLM").outputs
    run = served(module, 4, module if draft else None)
    name, output = max(expected.items(), key=lambda item: len(set(item[1])))
    stop = output[9]
    ends = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
    run.ask({name: prompts(5, int(name.split("q")[1][0]))[name.removeprefix("again-")]}, ends)
    assert run.outputs[name] == output[: output.index(stop) + 1]
    assert run.ended[name].reason == "stop"
    assert not any(run.engine.core.memory.snapshot().used)


def test_what_draft_tokens_take_is_counted_before_it_is_taken() -> None:
    """The reserve covers every row of logits, whatever the draft model's size."""
    module = words_module("LlamaForCausalLM")
    run = served(module, 4, words_module("Gemma3ForCausalLM", 8))
    answers(run)
    arena = run.engine.arena
    assert 0 < arena.peak_bytes <= arena.capacity_bytes
    assert run.engine.contract.weights_bytes > served(module).engine.contract.weights_bytes
    assert {group.name for group in run.engine.contract.groups} == {
        "full",
        "draft-full",
        "draft-sliding(9)",
    }


def test_texts_beyond_the_draft_models_context_go_on_without_draft_tokens() -> None:
    context = 40
    small = tiny_config(LLAMA, vocab_size=WORDS, max_position_embeddings=context)
    run = served(words_module(LLAMA), 4, random_module(small, seed=3, scale=8.0))
    alone = served(words_module(LLAMA))
    for one in (run, alone):
        one.ask(prompts(4), GREEDY)
    assert run.outputs == alone.outputs
    work = [work for plan in run.plans for work in plan.work]
    assert 0 < max(w.start + w.count for w in work if w.proposed) <= context
    assert max(w.start + w.count for w in work) > context
