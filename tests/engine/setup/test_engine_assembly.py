"""The constants of a run, from a pool and a model; and errors in options."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.assembly import EngineOptions, load_model, make_limits
from kvell.engine.setup.speculative_models import check_speculation
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind, LayerSpec, Layout, large_pages_needed, plan_layout
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import KIB, MIB
from tests.depth import some
from tests.pages.pools import layers

GEMMA = layers([512, 512, 512, 512, 512, 0] * 3)


def model(max_model_len: int = 32_768, specs: Sequence[LayerSpec] = GEMMA) -> PagedModel:
    description = SimpleNamespace(
        max_model_len=max_model_len, vocab_size=262_144, layers=specs, short_rope_tokens=0
    )
    return cast(PagedModel, SimpleNamespace(description=description, has_head=True))


def gemma_pool(kv_bytes: int) -> Layout:
    return plan_layout(GEMMA, kv_bytes)


def test_a_large_pool_serves_the_models_own_limit() -> None:
    limits = make_limits(gemma_pool(1024 * MIB), model(), EngineOptions())
    assert (limits.max_model_len, limits.vocab_size) == (32_768, 262_144)
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (2048, 256)


def test_a_small_pool_serves_what_fits_and_not_a_token_more() -> None:
    layout = gemma_pool(32 * MIB)
    limits = make_limits(layout, model(), EngineOptions())
    fits, chunk = limits.max_model_len, limits.min_chunk_tokens
    assert 512 < fits < 32_768
    assert large_pages_needed(layout, fits, 1, chunk) <= layout.num_large_pages
    assert large_pages_needed(layout, fits + 1, 1, chunk) > layout.num_large_pages


def test_a_wished_length_is_taken_when_it_fits() -> None:
    options = EngineOptions(max_model_len=1000, max_num_batched_tokens=64, max_num_seqs=3)
    limits = make_limits(gemma_pool(32 * MIB), model(), options)
    assert (limits.max_model_len, limits.max_num_batched_tokens, limits.max_num_seqs) == (
        1000,
        64,
        3,
    )


def test_without_chunks_a_request_is_as_long_as_a_step_and_its_whole_prompt_fits() -> None:
    options = EngineOptions(max_num_batched_tokens=1500, enable_chunked_prefill=False)
    limits = make_limits(gemma_pool(1024 * MIB), model(), options)
    assert (limits.max_model_len, limits.enable_chunked_prefill) == (1500, False)
    layout = gemma_pool(24 * MIB)
    small, chunked = (make_limits(layout, model(), one) for one in (options, EngineOptions()))
    longest = small.max_model_len
    assert 512 < longest < min(1500, chunked.max_model_len)
    assert large_pages_needed(layout, longest, 1, longest) <= layout.num_large_pages
    assert large_pages_needed(layout, longest + 1, 1, longest + 1) > layout.num_large_pages


def test_without_chunks_a_wish_for_more_than_a_step_is_refused() -> None:
    options = EngineOptions(max_model_len=2049, enable_chunked_prefill=False)
    with pytest.raises(ChangeSomething, match="use at least 2049") as told:
        make_limits(gemma_pool(1024 * MIB), model(), options)
    assert told.value.field == "--max-num-batched-tokens"
    wide = replace(options, max_num_batched_tokens=2049)
    assert make_limits(gemma_pool(1024 * MIB), model(), wide).max_model_len == 2049
    with pytest.raises(ChangeSomething, match="too small for one request") as small:
        make_limits(gemma_pool(24 * MIB), model(), wide)
    need_kib = int(small.value.remedy.split("--kv-memory ")[1].split("KiB")[0])
    assert make_limits(gemma_pool(need_kib * KIB), model(), wide).max_model_len == 2049


def test_more_than_the_model_was_made_for_is_refused() -> None:
    with pytest.raises(ChangeSomething, match="limit of 100 tokens; use at most 100") as told:
        make_limits(gemma_pool(32 * MIB), model(100), EngineOptions(max_model_len=101))
    assert (told.value.field, told.value.value) == ("--max-model-len", 101)


def test_a_pool_too_small_for_the_wish_says_which_of_the_two_to_change() -> None:
    with pytest.raises(ChangeSomething, match="--max-model-len=20000") as told:
        make_limits(gemma_pool(32 * MIB), model(), EngineOptions(max_model_len=20_000))
    assert told.value.field == "--kv-memory"
    words = told.value.remedy.split()
    enough_kib, shorter = int(words[2].removesuffix("KiB")), int(words[-1])
    roomy = make_limits(gemma_pool(enough_kib * KIB), model(), EngineOptions(max_model_len=20_000))
    assert roomy.max_model_len == 20_000
    modest = make_limits(gemma_pool(32 * MIB), model(), EngineOptions(max_model_len=shorter))
    assert modest.max_model_len == shorter


def test_a_pool_that_serves_nothing_is_refused() -> None:
    with pytest.raises(ChangeSomething, match="too small for one request") as told:
        make_limits(gemma_pool(245_760), model(), EngineOptions())
    assert told.value.field == "--kv-memory"
    assert "--max-model-len" not in told.value.remedy, "no length would help"


shapes = st.lists(
    st.builds(
        lambda window, heads: (window, heads), st.sampled_from([0, 64, 512]), st.integers(1, 9)
    ),
    min_size=1,
    max_size=12,
).map(lambda drawn: [layers([w], kv_heads=h)[0] for w, h in drawn])


@some()
@given(shapes, st.integers(2, 4000), st.integers(4 * MIB, 32 * MIB))
def test_memory_that_was_said_to_be_enough_is_enough(
    drawn: list[LayerSpec], wished: int, kv_bytes: int
) -> None:
    specs = [replace(spec, index=i) for i, spec in enumerate(drawn)]
    options = EngineOptions(max_model_len=wished)
    try:
        limits = make_limits(plan_layout(specs, kv_bytes), model(specs=specs), options)
    except ChangeSomething as error:
        kib = int(error.remedy.split()[2].removesuffix("KiB"))
        limits = make_limits(plan_layout(specs, kib * KIB), model(specs=specs), options)
    assert limits.max_model_len == wished


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChangeSomething, match=r"--dtype=int3: .*float32, bfloat16"):
        load_model(tmp_path, "int3", "cpu", lambda what, done: None)


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ChangeSomething, match=r"--device=cuda: .*use cpu"):
        load_model(Path("anywhere"), "auto", "cuda", lambda what, done: None)


def test_a_draft_model_bounds_its_draft_tokens_alone() -> None:
    options = EngineOptions(num_speculative_tokens=2)
    limits = make_limits(gemma_pool(1024 * MIB), model(), options, model(4_096))
    assert (limits.max_model_len, limits.num_speculative_tokens) == (32_768, 2)
    assert limits.has_drafter and limits.draft_tokens_end == 4_096
    alone = make_limits(gemma_pool(1024 * MIB), model(), options)
    assert not alone.has_drafter and alone.draft_tokens_end == 0


@pytest.mark.parametrize(
    ("wish", "field", "problem"),
    [
        ({"num_speculative_tokens": -1}, "--num-speculative-tokens", "below 0"),
        ({"prompt_lookup_min": 0}, "--prompt-lookup-min", "not between 1 and"),
        ({"prompt_lookup_min": 7}, "--prompt-lookup-min", "--prompt-lookup-max=5"),
    ],
)
def test_draft_tokens_that_contradict_themselves_are_refused(
    wish: dict[str, int], field: str, problem: str
) -> None:
    with pytest.raises(ChangeSomething, match=problem) as told:
        check_speculation(model(), None, EngineOptions(**wish))  # type: ignore[arg-type]
    assert told.value.field == field


def drafting(vocab_size: int, kind: GroupKind = GroupKind.FULL) -> PagedModel:
    description = SimpleNamespace(
        architecture="TinyForCausalLM",
        vocab_size=vocab_size,
        layers=(LayerSpec(0, kind, 1, 64, 2),),
    )
    return cast(PagedModel, SimpleNamespace(description=description, has_head=True))


@pytest.mark.parametrize(
    ("draft", "draft_tokens", "problem"),
    [
        (drafting(99), 0, "use --num-speculative-tokens 4"),
        (drafting(98), 2, "vocabulary of 98 tokens, the model one of 99"),
        (drafting(99, GroupKind.VISION), 2, "takes images, which no draft model is given"),
    ],
)
def test_a_model_that_cannot_draft_for_another_is_refused(
    draft: PagedModel, draft_tokens: int, problem: str
) -> None:
    options = EngineOptions(num_speculative_tokens=draft_tokens)
    with pytest.raises(ChangeSomething, match=problem) as told:
        check_speculation(drafting(99), draft, options)
    assert (told.value.field, told.value.value) == ("--speculative-model", "TinyForCausalLM")
    check_speculation(drafting(99), drafting(99), EngineOptions(num_speculative_tokens=2))
