"""States in the fused pass: cuts, resumption, and what pages hold, against transformers' own."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvell.attention.states import StateBatch
from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.pages.layout import GroupKind
from tests.models.cases import covering
from tests.models.fused_models import (
    MARKED_SETS,
    bf16_module,
    every_set,
    fused_model,
    generic_model,
)
from tests.models.harness import (
    PagedRunner,
    assert_exact,
    oracle_logits,
    prompt_ids,
    runner_over,
    tiny_config,
    tiny_module,
)

FALCON = "FalconH1ForCausalLM"
CUTS = (1, 2, 16, 17, 40, 64, 100, 128)


def roomy(model: PagedModel) -> PagedRunner:
    return runner_over(model, large_pages=60)


@covering({"instruction_set": MARKED_SETS, "threads": [1, 3]}, together=1)
def test_states_kept_on_the_way_are_resumed_exactly(instruction_set: str, threads: int) -> None:
    """Cuts inside one step, and twice at one token, beside another request."""
    module, ids, other = tiny_module(FALCON), prompt_ids(150), prompt_ids(75, seed=2)
    expected = oracle_logits(module, ids)
    runner = roomy(fused_model(module, instruction_set, num_threads=threads))
    logits = runner.step([("other", other), ("a", ids)], {"a": (*CUTS, 40), "other": (33, 75)})
    assert_exact(logits[75:], expected)
    for length in CUTS:
        runner.resume(f"from{length}", "a", length)
        resumed = runner.step([(f"from{length}", ids[length:])])
        assert torch.equal(resumed, logits[75 + length :]), "float32 states lose nothing"
    runner.resume("again", "other", 33)
    assert_exact(runner.step([("again", other[33:])]), oracle_logits(module, other)[33:])


@every_set
def test_a_state_kept_by_a_later_chunk_is_that_of_one_pass(instruction_set: str) -> None:
    module, ids = tiny_module(FALCON), prompt_ids(120)
    runner = roomy(fused_model(module, instruction_set))
    runner.step([("a", ids[:50])])
    runner.step([("a", ids[50:51])], {"a": (51,)})
    runner.step([("a", ids[51:])], {"a": (96, 120)})
    for length in (51, 96):
        runner.resume(f"from{length}", "a", length)
        logits = runner.step([(f"from{length}", ids[length:])])
        assert_exact(logits, oracle_logits(module, ids)[length:])


@covering({"dtype": [torch.float32, torch.bfloat16], "instruction_set": MARKED_SETS}, together=1)
def test_pages_hold_what_the_generic_pass_keeps(dtype: torch.dtype, instruction_set: str) -> None:
    """Of the first layer, which reads the same: so either pass may go on where the other was."""
    module, ids = copy.deepcopy(tiny_module(FALCON)).to(dtype), prompt_ids(21)
    kept = []
    for made in (fused_model, generic_model):
        model = made(module, instruction_set)
        runner = roomy(model)
        runner.step([("a", ids[:20])], {"a": (9,)})
        runner.step([("a", ids[20:])])
        kept.append([first_states(runner, model, runner.requests["a"].pages)])
        kept[-1].append(first_states(runner, model, runner.kept["a", 9]))
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for ours, theirs in zip(*kept, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert other.abs().max() > 0
            assert (mine - other).abs().max() <= tolerance * other.abs().max()


def first_states(
    runner: PagedRunner, model: PagedModel, pages: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    memory = model._memory
    assert memory is not None
    states = memory.states
    rows, group = states.pages[0], states.groups[0]
    assert rows.recurrent is not None
    page = pages[group][rows.part]
    return rows.window[page].float(), rows.recurrent[page].float()


@every_set
def test_states_go_where_the_step_says(instruction_set: str) -> None:
    """To another page, to none, or to the running state's own."""
    module, ids = tiny_module(FALCON), prompt_ids(30)
    model = fused_model(module, instruction_set)
    whole = roomy(model).step([("a", ids)])
    runner = roomy(model)
    runner.step([("a", ids[:9])])
    before = pool_of_states(runner, "a")
    forward, forward_with = model.forward, ends_in(runner, model)
    model.forward = forward_with(lambda pages: torch.full_like(pages, -1))  # type: ignore[method-assign]
    drafted = runner.step([("a", [*ids[9:12], 5, 5])])
    assert torch.equal(drafted[:3], whole[9:12])
    assert all(map(torch.equal, pool_of_states(runner, "a"), before))
    runner.requests["a"].computed = 9
    model.forward = forward  # type: ignore[method-assign]
    assert torch.equal(runner.step([("a", ids[9:12])]), whole[9:12])
    moved = [runner.free[1].pop() for _ in range(3)]
    model.forward = forward_with(lambda pages: torch.tensor([moved]).to(pages.dtype))  # type: ignore[method-assign]
    runner.step([("a", ids[12:20])])
    model.forward = forward  # type: ignore[method-assign]
    runner.requests["a"].pages[1] = moved
    assert torch.equal(runner.step([("a", ids[20:])]), whole[20:])


def pool_of_states(runner: PagedRunner, name: str) -> list[torch.Tensor]:
    return [runner.page_bytes(1, page).clone() for page in runner.requests[name].pages[1]]


def ends_in(runner: PagedRunner, model: PagedModel) -> Any:
    """``model.forward`` with other pages at the ends of requests."""
    assert runner.layout.groups[1].kind is GroupKind.STATE
    forward = model.forward

    def with_ends(made: Any) -> Any:
        def run(batch: ForwardBatch, callbacks: Any = None) -> torch.Tensor:
            states = batch.groups[1]
            assert isinstance(states, StateBatch)
            ends = replace(states, end_page_ids=made(states.page_ids))
            return forward(replace(batch, groups=(batch.groups[0], ends)), callbacks)

        return run

    return with_ends


VARIANTS: list[dict[str, Any]] = [
    {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
    {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    {"mamba_conv_bias": False, "mamba_proj_bias": True, "projectors_bias": True},
    {"attention_bias": True, "mlp_bias": True},
    {"mamba_d_state": 20, "mamba_d_conv": 2},
    {"mamba_d_ssm": 60, "mamba_n_heads": 6, "mamba_d_head": 10, "mamba_n_groups": 3},
    {"mamba_d_ssm": 160, "mamba_n_heads": 2, "mamba_d_head": 80, "mamba_d_conv": 8},
    {"tie_word_embeddings": True},
]


@covering({"changes": VARIANTS, "instruction_set": MARKED_SETS}, together=1)
def test_variants(changes: dict[str, Any], instruction_set: str) -> None:
    module = random_module(tiny_config(FALCON, **changes), 5, torch.float32, 8.0)
    if changes.get("tie_word_embeddings"):
        module.lm_head.weight = module.model.embed_tokens.weight
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    ids, runner = prompt_ids(39), roomy(fused_model(module, instruction_set))
    steps = (ids[:33], ids[33:34], ids[34:35], ids[35:])
    logits = torch.cat([runner.step([("a", step)]) for step in steps])
    assert_exact(logits, oracle_logits(module, ids))


def test_step_sizes_stay_within_their_limits() -> None:
    module = random_module(tiny_config(FALCON, time_step_limit=(0.4, 0.6)), 5, torch.float32, 8.0)
    ids = prompt_ids(30)
    logits = [roomy(model(module)).step([("a", ids)]) for model in (fused_model, generic_model)]
    assert_exact(*logits)
    free = random_module(tiny_config(FALCON), 5, torch.float32, 8.0)
    other = roomy(fused_model(free)).step([("a", ids)])
    assert (other - logits[0]).abs().max() > 0.01 * other.abs().max()


def test_states_in_16_bits_are_rounded_where_a_step_ends_and_nowhere_else() -> None:
    """What goes on beside them, and where they lie, changes no bit."""
    model, ids, other = fused_model(bf16_module(FALCON)), prompt_ids(40), prompt_ids(31, seed=1)
    alone, beside = roomy(model), runner_over(model, shuffle_seed=4, large_pages=60)
    for start, end in ((0, 17), (17, 18), (18, 40)):
        step = ("a", ids[start:end])
        own = alone.step([step], {"a": (end,)} if end == 17 else {})
        both = beside.step([("b", other[start // 2 : end // 2 + 1]), step], {"b": ()})
        assert torch.equal(both[-(end - start) :], own)


def test_the_compiled_pass_checks_states_for_itself() -> None:
    model = fused_model(tiny_module(FALCON))
    runner = roomy(model)
    runner.step([("a", prompt_ids(5))])
    seen: list[ForwardBatch] = []
    forward = model.forward

    def spy(batch: ForwardBatch, callbacks: Any = None) -> torch.Tensor:
        seen.append(batch)
        return forward(batch, callbacks)

    model.forward = spy  # type: ignore[assignment, method-assign]
    runner.step([("a", prompt_ids(6))], {"a": (7,)})
    batch = seen[0]
    states = batch.groups[1]
    assert isinstance(states, StateBatch)
    wrong: list[tuple[str, dict[str, torch.Tensor]]] = [
        ("page_ids", {"page_ids": states.page_ids + 100_000}),
        ("page_ids", {"page_ids": -states.page_ids - 1}),
        ("cut_page_ids", {"cut_page_ids": states.cut_page_ids + 100_000}),
        ("cut_requests", {"cut_requests": states.cut_requests + 1}),
        ("cut_tokens", {"cut_tokens": states.cut_tokens * 0}),
        ("cut_tokens", {"cut_tokens": states.cut_tokens + 6}),
        ("query_starts", {"query_starts": states.query_starts + 1}),
        ("starts", {"starts": states.starts - 100}),
        ("starts", {"starts": states.starts.repeat(2)}),
        ("2 cuts", {"cut_requests": states.cut_requests.repeat(2)}),
        ("end_page_ids", {"end_page_ids": states.page_ids - 100_000}),
        ("fewer pages|1 pages", {"page_ids": states.page_ids[:, :1].contiguous()}),
        ("int32", {"starts": states.starts.long()}),
    ]
    for match, changes in wrong:
        with pytest.raises(ValueError, match=match):
            forward(replace(batch, groups=(batch.groups[0], replace(states, **changes))))
    with pytest.raises(RuntimeError, match="no metadata for"):
        forward(replace(batch, groups=(batch.groups[0], None)))
    with pytest.raises(RuntimeError, match="no metadata for a group of keys"):
        forward(replace(batch, groups=(None, states)))
