"""A compiled pass takes what it said beforehand, from memory that it was lent, and no more."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvell.models.fused.need import ALIGN_BYTES, StepParts
from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import PagedModel
from tests.models.fused_models import fused_model
from tests.models.harness import PagedRunner, prompt_ids, runner_over, tiny_config, tiny_module

SHAPES = [(0, 0), (1, 1), (7, 3), (100, 0), (333, 77), (2000, 200)]
FAMILIES = ["FalconH1ForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM"]


def forward_of(fused: Any) -> Any:
    return fused._forward


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_buffer_is_counted_as_the_compiled_pass_cuts_it(
    architecture: str, dtype: torch.dtype
) -> None:
    model = fused_model(copy.deepcopy(tiny_module(architecture)).to(dtype))
    assert model.fused is not None
    for tokens, rows in SHAPES:
        rows_bytes = forward_of(model.fused).workspace_bytes(tokens, rows)
        parts = StepParts(model.fused.buffers.fixed_bytes, rows_bytes, 4 * 509 * rows)
        assert model.activations.need_bytes(tokens, rows) == parts.total_bytes


def test_a_larger_step_never_needs_less() -> None:
    need = fused_model(tiny_module("Qwen3ForCausalLM")).activations
    for (tokens, rows), (more, other) in itertools.pairwise(SHAPES):
        assert need.need_bytes(tokens, rows) <= need.need_bytes(more, max(rows, other))


def long_model(threads: int, kv_heads: int = 2) -> PagedModel:
    config = tiny_config(
        "LlamaForCausalLM", num_key_value_heads=kv_heads, max_position_embeddings=4096
    )
    return fused_model(random_module(config, 3, torch.float32, 8.0), num_threads=threads)


def measured(model: PagedModel, runner: PagedRunner, steps: list[list[int]]) -> list[int]:
    """Bytes that steps of these requests' next tokens used; by step, tokens for each request."""
    assert model.fused is not None
    used = []
    for step in steps:
        work = [(str(index), prompt_ids(count)) for index, count in enumerate(step) if count]
        runner.step(work)
        used.append(model.fused.used_bytes)
    return used


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_a_step_uses_is_what_was_predicted(threads: int) -> None:
    """But for records of contexts that threads share, which it has room for and may not need."""
    model = long_model(threads)
    assert model.fused is not None
    records_bytes = model.fused.buffers.fixed_bytes - slices_bytes(model, threads)
    assert (records_bytes > 0) == (threads > 1)
    steps = [[1500, 3], [1, 1], [700, 0], [1, 40], [1, 1]]
    used = measured(model, runner_over(model, large_pages=600), steps)
    for step, used_bytes in zip(steps, used, strict=True):
        left_bytes = model.activations.need_bytes(sum(step), sum(step)) - used_bytes
        assert 0 <= left_bytes < records_bytes + 2 * ALIGN_BYTES
    shared = [
        measured(model, runner_over(model, large_pages=600), [[context], [40]])[1]
        for context in (3, 2000)
    ]
    assert (shared[1] > shared[0]) == (threads > 1), "longer contexts leave more records"


def slices_bytes(model: PagedModel, threads: int) -> int:
    """What threads need without any records: whole small pages each."""
    assert model.fused is not None
    size_bytes: int = forward_of(model.fused).attention_bytes(1, 0)
    return size_bytes * threads


def test_where_records_have_no_room_rows_are_cut_otherwise_with_equal_results() -> None:
    model, ids = long_model(3), prompt_ids(2100)
    assert model.fused is not None
    steps = [ids[:2050], *([token] for token in ids[2050:])]
    own = [runner_over(model, large_pages=300).step([("a", ids[:2050])])]
    runner = runner_over(model, large_pages=300)
    free = [runner.step([("a", step)]) for step in steps]
    model.fused._attention_bytes = slices_bytes(model, 3)  # no records at all
    runner = runner_over(model, large_pages=300)
    tight = [runner.step([("a", step)]) for step in steps]
    assert torch.equal(torch.cat(free), torch.cat(tight))
    assert torch.equal(own[0], free[0])


def test_a_step_computes_in_the_memory_it_was_lent() -> None:
    model, ids = fused_model(tiny_module("LlamaForCausalLM")), prompt_ids(9)
    assert model.fused is not None
    own = runner_over(model).step([("a", ids)])
    lent = torch.zeros(model.activations.need_bytes(9, 9), dtype=torch.uint8)
    model.fused.use_memory(lent)
    logits = runner_over(model).step([("a", ids)])
    assert torch.equal(logits, own)
    assert logits.data_ptr() == lent.data_ptr() + lent.numel() - logits.nbytes - _pad(logits.nbytes)
    assert lent.count_nonzero() > 9 * 48 * 4
    model.fused.use_memory(None)
    assert torch.equal(runner_over(model).step([("a", ids)]), own)


def _pad(size_bytes: int) -> int:
    return -size_bytes % ALIGN_BYTES


def test_a_step_that_was_lent_too_little_is_refused_before_it_computes() -> None:
    model, ids = fused_model(tiny_module("LlamaForCausalLM")), prompt_ids(9)
    assert model.fused is not None
    need_bytes = model.activations.need_bytes(9, 9)
    lent = torch.zeros(need_bytes - 1, dtype=torch.uint8)
    model.fused.use_memory(lent)
    with pytest.raises(ValueError, match=f"a step of {need_bytes} bytes was given"):
        runner_over(model).step([("a", ids)])
    assert lent.count_nonzero() == 0


def test_the_compiled_pass_checks_for_itself() -> None:
    """Whoever says a wrong size is refused there, before anything is written."""
    model, ids = fused_model(tiny_module("LlamaForCausalLM")), prompt_ids(9)
    assert model.fused is not None
    runner = runner_over(model)
    runner.step([("a", ids)])
    made = model.fused._made_room
    few = StepParts(1 << 16, 128, 4 * 509 * len(ids))
    model.fused._made_room = lambda tokens, rows: replace(made(tokens, rows), parts=few)  # type: ignore[method-assign]
    model.fused.use_memory(None)
    with pytest.raises(ValueError, match="workspace: the step needs"):
        runner.step([("a", ids)])
    few = StepParts(64, 1 << 20, 4 * 509 * len(ids))
    model.fused.use_memory(None)
    with pytest.raises(ValueError, match="scratch"):
        runner.step([("a", ids)])
