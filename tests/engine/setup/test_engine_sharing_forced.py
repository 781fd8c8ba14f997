"""Chunks, swaps and parked prompts moved at random, mappings refused: tokens stay exact.

Real models, one pool, one buffer; journals replay, and nothing is left behind.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvell.device.chunks import AddressRange, Ints
from kvell.device.host import CHUNK_BYTES
from kvell.elastic.arena import ActivationNeed
from kvell.elastic.logical_buffer import CpuBuffer
from kvell.elastic.memory import ElasticMemory
from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, replay
from kvell.engine.core.lateness import Lateness
from kvell.engine.cpu_buffer.buffered_prefixes import BufferedPrefixes
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.engine import Engine
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.protocol.messages import Cancel, Event, Submit
from kvell.engine.setup.objectives import ObjectiveWatch
from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.sharing import share_pool
from kvell.errors import TryLater
from kvell.memory import MemoryCore, create_core
from kvell.vocabulary import MIB, StepNumber
from tests.device.fake_chunks import FakeChunks
from tests.elastic.balloon_audit import audit_elastic
from tests.elastic.buffer_audit import audit_pages
from tests.engine.seen import (
    swapping_of,
    use_memory,
    use_objectives,
    use_rule,
)
from tests.engine.setup.shared_pool import (
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
        assert audit_elastic(self.memory) == []


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return wide_module()


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    return prompts(18, seed=9)


@pytest.fixture(scope="module")
def expected(module: torch.nn.Module, asked: list[list[int]]) -> dict[str, list[int]]:
    return answers(
        engine_over(
            module,
            EngineOptions(kv_memory_bytes=64 * MIB, max_model_len=1024, max_num_batched_tokens=512),
        ),
        asked,
    )


def forced_engine(module: torch.nn.Module, seed: int) -> Engine:
    engine = engine_over(module, roomy(module, 14))
    memory = Forced(engine.core.memory, elastic_of(engine), engine.activations, seed)
    use_memory(engine.core, memory)
    return engine


def assert_nothing_left(engine: Engine) -> None:
    """No page in use, no slot granted, and the books agree."""
    elastic = elastic_of(engine)
    assert not any(engine.core.memory.snapshot().used)
    steps = engine.core.scheduler.chunks.memory
    assert isinstance(steps, SharedMemory)
    SharedMemory.begin(steps, StepNumber(engine.core.step + 1), engine.core.step)
    assert elastic.figures()["activation_used_chunks"] == 0
    assert audit_elastic(elastic) == []


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


class Preempting(Forced):
    """Also refuses memory to decodes, so that the youngest goes to the CPU buffer."""

    def before_decodes(self, lengths: Sequence[int]) -> bool:
        return super().before_decodes(lengths) and self._draw.random() > 0.2


POOL_MIB, BUFFER_MIB = 14, 32


class Dice(ObjectiveWatch):
    """Reports lateness at random, of first tokens more often than of others."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def on_command(self, command: Submit | Cancel, events: Sequence[Event]) -> None:
        """Ignore all commands and events."""

    def after_step(self, events: Sequence[Event]) -> Lateness:
        return Lateness(self._draw.random() < 0.8, self._draw.random() < 0.1)


def parking_engine(module: torch.nn.Module, seed: int, journal: Journal | None = None) -> Engine:
    """An engine whose memory, swaps and lateness follow a seed."""
    options = roomy(module, POOL_MIB, cpu_buffer_bytes=BUFFER_MIB * MIB, slo_ttft_seconds=1.0)
    engine = engine_over(module, options, journal)
    memory = Preempting(engine.core.memory, elastic_of(engine), engine.activations, seed)
    use_memory(engine.core, memory)
    use_objectives(engine, Dice(seed))
    use_rule(swapping_of(engine.core), Always())
    return engine


def assert_used(engine: Engine) -> None:
    rungs = engine.core.stats().rungs
    ways = ("inflate", "deflate", "preempt", "swap_out", "swap_in", "offload", "cache_out")
    assert all(rungs[way] > 0 for way in ways), rungs


def assert_buffer_empty(engine: Engine) -> None:
    swapping, parking = swapping_of(engine.core), engine.core.scheduler.parking
    assert parking is not None
    engine.core.scheduler.drop_reserves()
    swapping.begin()
    assert audit_pages(swapping.buffer) == []
    assert swapping.buffer.used_large == 0
    assert not parking.sizes.held
    assert not parking.parked


@pytest.mark.parametrize("seed", some_fast(SEEDS, SEEDS[:1]))
def test_tokens_are_exact_whatever_moves_and_whatever_the_device_refuses(
    module: torch.nn.Module,
    asked: list[list[int]],
    expected: dict[str, list[int]],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = parking_engine(module, seed)
    device: Any = elastic_of(engine).device
    draw, map_really = random.Random(seed), device.map

    def refusing_map(area: AddressRange, positions: Ints, chunks: Ints) -> None:
        if draw.random() < 0.3:
            raise TryLater("device: injected")
        map_really(area, positions, chunks)

    monkeypatch.setattr(device, "map", refusing_map)
    assert answers(engine, asked) == expected
    assert_used(engine)
    assert engine.core.stats().rungs["refused_by_device"] > 0
    assert_nothing_left(engine)
    assert_buffer_empty(engine)


@pytest.mark.parametrize("seed", some_fast(SEEDS, SEEDS[:1]))
def test_a_journal_of_all_that_replays_to_equal_plans(
    module: torch.nn.Module, asked: list[list[int]], seed: int
) -> None:
    journal = Journal()
    engine = parking_engine(module, seed, journal)
    watched = engine.runner = Watched(engine.runner)
    answers(engine, asked)
    assert_used(engine)
    assert any(plan.parked for plan in watched.plans)
    assert any(isinstance(entry, Lateness) for entry in journal.entries)
    assert replay(journal.entries, again(engine, seed)) == watched.plans


def again(engine: Engine, seed: int) -> EngineCore:
    """A new engine core for the same decisions, over a device without bytes."""
    layout, limits = engine.core.memory.layout, engine.core.limits
    core = create_core(layout)
    device = FakeChunks(elastic_of(engine).device.num_chunks, CHUNK_BYTES, has_bytes=False)
    shared = share_pool(device, layout, core, engine.activations)
    num_large = BUFFER_MIB * MIB // layout.large_page_bytes
    buffer = PageBuffer(layout.groups, num_large)
    offloaded = engine.core.scheduler.offloaded
    assert offloaded is not None
    swapping = Swapping(core, buffer, Always(), BufferedPrefixes(core, buffer, Always()))
    return EngineCore(
        core,
        limits,
        frozenset(),
        memory=Preempting(core, shared.elastic, engine.activations, seed),
        swapping=swapping,
        parking=Parking(core, swapping, CpuBuffer(num_large), limits.min_chunk_tokens),
        buffer_large=offloaded.first_large,
    )
