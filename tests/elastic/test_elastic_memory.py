"""Plans carried out: what the device refuses leaves owners as they were; speculation comes back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.elastic.arena import ActivationArena, ActivationModel, LargestNeed, StepBuffers
from kvell.elastic.memory import ElasticMemory
from kvell.elastic.tiling import tiling
from kvell.errors import TryLater
from kvell.memory import create_core
from tests.device.fake_chunks import FakeChunks
from tests.elastic.balloon_audit import audit_elastic
from tests.pages.pools import group, pool_of

CHUNK_BYTES = 256
"""One large page of four small ones."""


def memory_of(num_chunks: int, committed: int | None = None) -> ElasticMemory:
    core = create_core(pool_of(num_chunks, group(4, 4)))
    device = FakeChunks(num_chunks, CHUNK_BYTES)
    return ElasticMemory(device, core, tiling(num_chunks, CHUNK_BYTES, 256), committed)


def fake(memory: ElasticMemory) -> FakeChunks:
    assert isinstance(memory.device, FakeChunks)
    return memory.device


def empty(memory: ElasticMemory) -> int:
    """Large pages that KV has, all of them empty here."""
    return int(np.count_nonzero(memory.kv.reclaim_order() == 1))


def test_a_slot_is_an_address_and_a_size_in_whole_chunks() -> None:
    memory = memory_of(8)
    slot = memory.grant(600, step=1)
    assert slot is not None
    assert (slot.num_chunks, slot.size_bytes) == (3, 768)
    assert slot.address == memory.area.address + slot.start * CHUNK_BYTES
    assert empty(memory) == 5
    memory.release(slot, step=1)
    again = memory.grant(700, step=2)
    assert again == slot and memory.counts.mapped == 3, "what stayed mapped is reused"
    assert audit_elastic(memory) == []


def test_a_mapping_that_is_refused_leaves_everything_as_it_was() -> None:
    memory = memory_of(8)
    fake(memory).fail("map", after=2)
    assert memory.grant(1000, step=1) is None
    assert (empty(memory), memory.balloon.activation_chunks, memory.counts.refused) == (8, 0, 1)
    assert audit_elastic(memory) == []
    assert memory.grant(1000, step=1) is not None


def test_more_than_there_is_is_refused() -> None:
    memory = memory_of(4)
    assert memory.grant(5 * CHUNK_BYTES, step=1) is None
    assert memory.ensure(9) == 4 and empty(memory) == 0


def test_chunks_can_be_had_before_a_slot_is() -> None:
    memory = memory_of(8)
    assert memory.ensure(3) == 3 and memory.ensure(2) == 3
    assert memory.counts.mapped == 0 and empty(memory) == 5
    slot = memory.grant(3 * CHUNK_BYTES, step=1)
    assert slot is not None and memory.counts.deflated == 3
    assert audit_elastic(memory) == []


def test_unmapping_waits_for_the_fence_and_is_tried_again() -> None:
    memory = memory_of(8)
    slot = memory.grant(4 * CHUNK_BYTES, step=5)
    assert slot is not None
    memory.release(slot, step=5)
    assert memory.inflate(3) == 3
    assert memory.tend(4) == 0
    fake(memory).fail("unmap", after=1)
    assert memory.tend(5) == 1
    assert audit_elastic(memory) == []
    assert memory.tend(5) == 2
    assert memory.counts.unmapped == 3


def test_the_warmer_gives_what_it_got_to_kv_even_if_it_is_cut_short() -> None:
    memory = memory_of(8, committed=2)
    assert empty(memory) == 2
    assert memory.warm(2) == 2 and empty(memory) == 4
    fake(memory).fail("commit", after=1)
    with pytest.raises(TryLater):
        memory.warm(4)
    assert empty(memory) == 5
    assert memory.warm(99) == 3 and memory.warm(1) == 0
    assert audit_elastic(memory) == []


def test_a_step_needs_its_fixed_part_its_tokens_and_its_logits() -> None:
    model = ActivationModel(fixed_bytes=1000, token_bytes=10, logits_row_bytes=100)
    assert model.need_bytes(0, 0) == 1000
    assert model.need_bytes(32, 2) == 1000 + 320 + 200


def test_a_grant_takes_what_fits_and_a_release_brings_it_back() -> None:
    arena = ActivationArena(100)
    assert arena.grant(60)
    assert not arena.grant(41)
    assert arena.granted_bytes == 60
    assert arena.grant(40)
    arena.release(60)
    arena.release(40)
    assert (arena.granted_bytes, arena.peak_bytes) == (0, 100)


def test_more_cannot_come_back_than_was_granted() -> None:
    arena = ActivationArena(100)
    assert arena.grant(10)
    with pytest.raises(ValueError, match="11 bytes were not granted"):
        arena.release(11)
    assert arena.granted_bytes == 10


@given(st.integers(0, 50), st.lists(st.integers(0, 30), max_size=20))
def test_what_is_granted_is_what_was_not_refused(capacity: int, needs: list[int]) -> None:
    arena, granted = ActivationArena(capacity), 0
    for need in needs:
        fits = granted + need <= capacity
        assert arena.grant(need) is fits
        granted += need if fits else 0
        assert arena.granted_bytes == granted <= capacity
    assert arena.peak_bytes == granted


sizes = st.lists(st.integers(1, 300), max_size=5).map(tuple)
counts = st.integers(0, 100)


@given(sizes, sizes, st.sampled_from([1, 64, 128]), counts, counts)
def test_buffers_lie_one_behind_the_other(
    by_token: tuple[int, ...], by_row: tuple[int, ...], align: int, tokens: int, rows: int
) -> None:
    need = StepBuffers(4 * align, by_token, by_row, align).need_bytes(tokens, rows)
    exact = 4 * align + tokens * sum(by_token) + rows * sum(by_row)
    assert need % align == 0
    assert exact <= need < exact + align * (len(by_token) + len(by_row) + 1)


def test_models_that_take_turns_need_what_the_largest_needs() -> None:
    wide, many = ActivationModel(0, 10, 1), ActivationModel(0, 1, 10)
    need = LargestNeed((wide, many))
    assert need.need_bytes(9, 1) == wide.need_bytes(9, 1) == 91
    assert need.need_bytes(1, 9) == many.need_bytes(1, 9) == 91
