"""One bound for weights, KV cache and activations: sizes, the contract, and tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvell.device.host import CHUNK_BYTES
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, Warmed, replay
from kvell.engine.setup.sharing import Bound, can_share, share_pool
from kvell.errors import ChangeSomething
from kvell.memory import create_core, requests_that_fit
from kvell.vocabulary import GIB, KIB, MIB
from tests.device.fake_chunks import FakeChunks
from tests.elastic.balloon_audit import audit_elastic
from tests.engine.setup.shared_pool import (
    Watched,
    answers,
    elastic_of,
    engine_over,
    prompts,
    roomy,
    weights_of,
    wide_module,
)
from tests.models.fused_models import fused_model, generic_model


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return wide_module()


def test_a_pool_is_not_shared_with_activations_that_a_whole_prompt_needs_at_any_time(
    module: torch.nn.Module,
) -> None:
    models = [fused_model(module)]
    options = roomy(module)
    assert can_share(models, options)
    assert not can_share(models, replace(options, enable_chunked_prefill=False))


def test_large_pages_of_a_shared_pool_hold_whole_chunks(module: torch.nn.Module) -> None:
    """A request that ends then frees chunks; a pool of few such pages keeps small ones."""
    wide, tight = (engine_over(module, roomy(module, mib)) for mib in (96, 16))
    alone = engine_over(module, EngineOptions(kv_memory_bytes=96 * MIB, max_model_len=1024))
    sizes = [one.core.stats().large_page_bytes for one in (wide, tight, alone)]
    tiled = elastic_of(wide).balloon.tiling
    within = [
        any(
            tiled.larges_over(chunk) == range(large, large + 1) for chunk in range(tiled.num_chunks)
        )
        for large in range(tiled.num_large)
    ]
    assert all(within)
    assert sizes[0] % sizes[2] == 0
    assert sizes[0] >= CHUNK_BYTES > sizes[1] == sizes[2]


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(20)


@pytest.fixture(scope="module")
def expected(module: torch.nn.Module, asked: list[list[int]]) -> dict[str, list[int]]:
    options = EngineOptions(
        kv_memory_bytes=64 * MIB, max_model_len=1024, max_num_batched_tokens=512
    )
    return answers(engine_over(module, options), asked)


def test_answers_are_those_of_a_pool_that_is_not_shared(
    module: torch.nn.Module, asked: list[list[int]], expected: dict[str, list[int]]
) -> None:
    engine = engine_over(module, roomy(module))
    assert answers(engine, asked) == expected
    assert len({token for tokens in expected.values() for token in tokens}) > 30
    stats = engine.core.stats()
    assert stats.rungs["deflate"] > 0 and stats.rungs["inflate"] > 0, "chunks went both ways"
    assert stats.memory["cold_chunks"] == 0
    assert audit_elastic(elastic_of(engine)) == []


def test_activations_lie_in_the_pool_and_nowhere_else(
    module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_over(module, roomy(module))
    elastic = elastic_of(engine)
    fused = engine.runner.models[""][0].fused  # type: ignore[attr-defined]
    use_memory, forward = fused.use_memory, fused.forward
    starts, logits = list[int](), list[int]()

    def used(given: torch.Tensor) -> None:
        starts.append(given.data_ptr() - elastic.area.address)
        use_memory(given)

    def computed(*step: Any) -> torch.Tensor:
        made: torch.Tensor = forward(*step)
        logits.append(made.data_ptr() - elastic.area.address)
        return made

    monkeypatch.setattr(fused, "use_memory", used)
    monkeypatch.setattr(fused, "forward", computed)
    answers(engine, [list(range(3, 400))])
    assert starts and not any(start % CHUNK_BYTES for start in starts)
    assert all(0 <= place < elastic.area.size_bytes for place in (*starts, *logits))
    assert len(logits) > 1, "each step computes in memory that it was given"
    assert elastic.counts.mapped > 0


def test_a_journal_replays_to_equal_plans_on_a_device_without_bytes(
    module: torch.nn.Module, asked: list[list[int]]
) -> None:
    """The journal has the committed chunks; the plans have the slots' places."""
    journal = Journal()
    options = roomy(module, 90)
    engine = engine_over(module, options, journal)
    watched = engine.runner = Watched(engine.runner)
    answers(engine, asked)
    plans = watched.plans
    assert any(isinstance(entry, Warmed) for entry in journal.entries)
    assert len({plan.slot for plan in plans}) > 2
    layout = engine.core.memory.layout
    core = create_core(layout)
    chunks = elastic_of(engine).device.num_chunks
    device = FakeChunks(chunks, CHUNK_BYTES, has_bytes=False)
    shared = share_pool(device, layout, core, engine.activations)
    again = EngineCore(core, engine.core.limits, frozenset(), memory=shared.steps)
    assert replay(journal.entries, again) == plans


def test_the_longest_that_the_contract_promises_is_served(module: torch.nn.Module) -> None:
    """Even if the whole pool caches something else."""
    engine = engine_over(module, roomy(module, 12, max_model_len=None))
    longest = engine.contract.max_model_len
    assert 200 < longest < 32_768, "the pool bounds it, not the model"
    draw = np.random.default_rng(1)
    asked = [draw.integers(3, 509, length).tolist() for length in (longest - 12, 90, longest - 12)]
    assert all(len(tokens) == 12 for tokens in answers(engine, asked, at_once=3).values())


def test_the_contract_names_the_bound_and_what_fits_in_it(module: torch.nn.Module) -> None:
    engine = engine_over(module, roomy(module, 40))
    made, layout = engine.contract, engine.core.memory.layout
    assert (made.shared_bytes, made.activation_reserve_bytes) == (40 * MIB, 0)
    assert made.total_bytes == made.weights_bytes + 40 * MIB
    assert made.contract_bytes == made.total_bytes + made.floor_bytes + 64 * MIB
    assert engine.ready().facts.memory == made.parts()
    for tokens, count in made.requests_that_fit:
        assert 0 < count < requests_that_fit(layout, tokens), "their activations are counted"
    assert any("in the pool, 40.0 MiB for both" in line for line in made.lines())


def test_a_bound_that_is_too_small_says_one_that_is_not(module: torch.nn.Module) -> None:
    with pytest.raises(ChangeSomething, match="--max-model-len=1024") as told:
        engine_over(module, roomy(module, 6))
    assert told.value.field == "--memory"
    enough_kib = int(told.value.remedy.split()[2].removesuffix("KiB"))
    engine = engine_over(module, roomy(module, memory_bytes=enough_kib * KIB))
    assert engine.contract.max_model_len == 1024
    assert enough_kib * KIB < weights_of(module) + 40 * MIB


def test_transformers_code_keeps_a_reserve_inside_the_bound(module: torch.nn.Module) -> None:
    model = generic_model(module)
    reserve_bytes = model.activations.need_bytes(512, 256)
    options = EngineOptions(
        memory_bytes=model.weight_bytes + reserve_bytes + 20 * MIB,
        max_num_batched_tokens=512,
        max_model_len=512,
    )
    engine = build_engine(model, "wide", options)
    made = engine.contract
    assert (made.shared_bytes, made.activation_reserve_bytes) == (0, reserve_bytes)
    assert made.total_bytes <= options.memory_bytes  # type: ignore[operator]
    assert engine.core.stats().memory == {}
    answers(engine, [[3, 4, 5]])


def test_what_cannot_share_keeps_a_reserve_too(module: torch.nn.Module) -> None:
    engine = engine_over(module, roomy(module, 60, manager="static"))
    assert engine.contract.shared_bytes == 0
    assert engine.contract.activation_reserve_bytes > 0


def test_the_starting_split_is_kvs_share(module: torch.nn.Module) -> None:
    options = roomy(module, 40, kv_memory_bytes=30 * MIB)
    assert elastic_of(engine_over(module, options)).balloon.idle_chunks == 5


BOUND = Bound(memory_bytes=1000 * MIB, weights_bytes=300 * MIB, reserve_bytes=100 * MIB)


def test_a_bound_leaves_what_weights_and_reserve_do_not_take() -> None:
    assert BOUND.pool_bytes(None, GIB) == 600 * MIB
    assert BOUND.pool_bytes(500 * MIB, GIB) == 500 * MIB


@pytest.mark.parametrize(
    ("bound", "kv_mib", "available_mib", "field", "why", "remedy"),
    [
        (BOUND, 700, 1024, "--kv-memory", "more than --memory leaves", "--kv-memory 600MiB"),
        (BOUND, None, 500, "--memory", "more than the machine's free memory", "--memory 800MiB"),
        (
            Bound(300 * MIB, 300 * MIB, 0),
            None,
            1024,
            "--memory",
            "leaves nothing for the KV cache after 300 MiB of weights",
            "--memory 364MiB",
        ),
    ],
)
def test_what_a_bound_cannot_hold_is_refused_by_name(
    bound: Bound, kv_mib: int | None, available_mib: int, field: str, why: str, remedy: str
) -> None:
    with pytest.raises(ChangeSomething, match=why) as told:
        bound.pool_bytes(kv_mib and kv_mib * MIB, available_mib * MIB)
    assert told.value.field == field
    assert (
        told.value.remedy.removeprefix("use at most ")
        .removeprefix("use at least ")
        .startswith(remedy)
    )
