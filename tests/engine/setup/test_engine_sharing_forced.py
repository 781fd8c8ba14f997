"""Chunks moved at random, mappings refused: tokens stay exact, nothing is left behind."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvell.device.chunks import AddressRange, Ints
from kvell.device.host import CHUNK_BYTES
from kvell.elastic.arena import ActivationNeed
from kvell.elastic.memory import ElasticMemory
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, replay
from kvell.engine.engine import Engine
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.sharing import share_pool
from kvell.errors import TryLater
from kvell.memory import MemoryCore, create_core
from kvell.vocabulary import MIB, StepNumber
from tests.device.fake_chunks import FakeChunks
from tests.engine.setup.test_engine_sharing import (
    Watched,
    answers,
    elastic_of,
    engine_over,
    prompts,
    roomy,
    wide_module,
)
from tests.engine.swapping import Always
from tests.models.cases import some_fast

SEEDS = [1, 2, 3]


class Forced(SharedMemory):
    """Moves chunks for no reason at the beginning of every step; audited after."""

    def __init__(
        self, core: MemoryCore, memory: ElasticMemory, need: ActivationNeed, seed: int
    ) -> None:
        super().__init__(core, memory, need)
        self._draw = random.Random(seed)

    def begin(self, step: StepNumber, completed_step: int) -> None:
        super().begin(step, completed_step)
        most = self.memory.balloon.tiling.num_chunks
        for _ in range(self._draw.randrange(4)):
            count = self._draw.randrange(1, most + 1)
            getattr(self.memory, self._draw.choice(["ensure", "inflate"]))(count)
        assert self.memory.audit() == []


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return wide_module()


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(14, seed=9)


@pytest.fixture(scope="module")
def expected(module: torch.nn.Module, asked: list[list[int]]) -> dict[str, list[int]]:
    return answers(
        engine_over(
            module,
            EngineOptions(kv_memory_bytes=64 * MIB, max_model_len=1024, max_num_batched_tokens=512),
        ),
        asked,
    )


def forced_engine(module: torch.nn.Module, seed: int, journal: Journal | None = None) -> Engine:
    engine = engine_over(module, roomy(module, 14), journal)
    core = engine.core
    forced = Forced(core.memory, elastic_of(engine), engine._activations, seed)
    core._scheduler._chunks.memory = forced
    return engine


def assert_nothing_left(engine: Engine) -> None:
    """No page in use, no slot granted, and the books agree."""
    elastic = elastic_of(engine)
    assert not any(engine.core.memory.snapshot().used)
    steps = engine.core._scheduler.memory
    assert isinstance(steps, SharedMemory)
    SharedMemory.begin(steps, StepNumber(engine.core.step + 1), engine.core.step)
    assert elastic.figures()["activation_used_chunks"] == 0
    assert elastic.audit() == []


@pytest.mark.parametrize("seed", some_fast(SEEDS, SEEDS[:1]))
def test_tokens_are_exact_however_chunks_move(
    module: torch.nn.Module, asked: list[list[int]], expected: dict[str, list[int]], seed: int
) -> None:
    engine = forced_engine(module, seed)
    assert answers(engine, asked) == expected
    counts = elastic_of(engine).counts
    assert min(counts.inflated, counts.deflated, counts.mapped, counts.unmapped) > 8
    assert_nothing_left(engine)


@pytest.mark.parametrize("seed", some_fast(SEEDS, SEEDS[:1]))
def test_tokens_are_exact_while_the_device_refuses_at_random(
    module: torch.nn.Module,
    asked: list[list[int]],
    expected: dict[str, list[int]],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = forced_engine(module, seed)
    device: Any = elastic_of(engine).device
    draw, map_really, unmap_really = random.Random(seed), device.map, device.unmap

    def refusing_map(area: AddressRange, positions: Ints, chunks: Ints) -> None:
        if draw.random() < 0.4:
            raise TryLater("device: injected")
        map_really(area, positions, chunks)

    def refusing_unmap(area: AddressRange, positions: Ints) -> int:
        done: int = unmap_really(area, positions[: draw.randrange(len(positions) + 1)])
        return done

    monkeypatch.setattr(device, "map", refusing_map)
    monkeypatch.setattr(device, "unmap", refusing_unmap)
    assert answers(engine, asked) == expected
    assert engine.core.stats().rungs["refused_by_device"] > 0
    assert_nothing_left(engine)


def test_a_forced_journal_replays_to_equal_plans(
    module: torch.nn.Module, asked: list[list[int]]
) -> None:
    journal = Journal()
    engine = forced_engine(module, 4, journal)
    watched = engine.runner = Watched(engine.runner)
    answers(engine, asked)
    layout = engine.core.memory.layout
    core = create_core(layout)
    device = FakeChunks(elastic_of(engine).device.num_chunks, CHUNK_BYTES, has_bytes=False)
    shared = share_pool(device, layout, core, engine._activations)
    forced = Forced(core, shared.elastic, engine._activations, 4)
    again = EngineCore(core, engine.core.limits, frozenset(), memory=forced)
    assert replay(journal.entries, again) == watched.plans


class Preempting(Forced):
    """Also refuses memory to decodes, so that the youngest goes to the CPU buffer."""

    def before_decodes(self, lengths: Sequence[int]) -> bool:
        return super().before_decodes(lengths) and self._draw.random() > 0.2


@pytest.mark.parametrize("seed", some_fast(SEEDS, SEEDS[:1]))
def test_tokens_are_exact_while_requests_are_swapped_and_the_device_refuses(
    module: torch.nn.Module,
    asked: list[list[int]],
    expected: dict[str, list[int]],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_over(module, roomy(module, 14, cpu_buffer_bytes=32 * MIB))
    scheduler = engine.core._scheduler
    forced = Preempting(engine.core.memory, elastic_of(engine), engine._activations, seed)
    device: Any = forced.memory.device
    draw, map_really = random.Random(seed), device.map

    def refusing_map(area: AddressRange, positions: Ints, chunks: Ints) -> None:
        if draw.random() < 0.3:
            raise TryLater("device: injected")
        map_really(area, positions, chunks)

    monkeypatch.setattr(device, "map", refusing_map)
    scheduler._chunks.memory = forced
    assert scheduler.swapping is not None
    monkeypatch.setattr(scheduler.swapping, "_rule", Always())
    assert answers(engine, asked) == expected
    assert engine.core.stats().rungs["swap_in"] > 1
    assert_nothing_left(engine)
    engine.core.let_go()
    scheduler.swapping.begin()
    assert scheduler.swapping.buffer.used_large == 0
