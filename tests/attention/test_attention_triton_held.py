"""Attention over work in memory, as captured launches read it: any grid, capacities, pads."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvell.attention.interface import GroupBatch
from kvell.attention.portable import PortableKernels
from tests.attention.cases import Shape, lengths_of, make_case, new_queries, store
from tests.models.cases import long_unless

pytest.importorskip("triton", reason="Triton is not made for this system")

from kvell.attention.triton import launch
from kvell.attention.triton.backend import TritonKernels
from kvell.attention.triton.filling import fill_items
from kvell.attention.triton.held import Capacity, HeldGroupBatch, held_work, most_programs
from kvell.attention.triton.launch import ScratchSize
from kvell.attention.triton.sizes import Blocks
from kvell.attention.triton.work import (
    Lengths,
    Tiling,
)

CPU = torch.device("cpu")
BLOCKS = (Blocks(16, 16, 4, 1, section_tokens=16), Blocks(32, 16, 4, 1))
POISON = 1 << 28
"""As a position, a page or a row it is far outside of all memory."""

SHAPES = {
    "plain": Shape(((40, 1), (33, 2)), heads=2, kv_heads=2, head_size=8),
    "parts of heads, a window": Shape(((40, 1), (40, 3)), 20, 1, 8, window_tokens=20, sinks=True),
    "int8 in chunks": Shape(((40, 2),), 2, 1, 16, chunk_tokens=24, pool_dtype=torch.int8),
    "latents": Shape(((40, 1),), heads=2, kv_heads=1, head_size=24, value_size=16),
}


def lengths_in(batch: GroupBatch) -> Lengths:
    rows = (batch.query_starts, batch.context_lens, batch.table_starts, batch.first_positions)
    return Lengths(*(row.numpy() for row in rows))


def held(
    batch: GroupBatch, tiling: Tiling, capacity: Capacity, programs: int, pads: int = 0
) -> HeldGroupBatch:
    """The batch with poison in the place of what no launch may read, and pads behind its tokens."""
    memory = np.full(capacity.num_ints, POISON, np.int32)
    fill_items(lengths_in(batch), tiling, capacity, memory)
    works = {tiling: held_work(torch.from_numpy(memory), capacity, programs)}
    unread = torch.full_like(batch.query_starts, POISON)
    pages = torch.cat([batch.page_ids, torch.full((3,), POISON, dtype=torch.int32)])
    writes = torch.cat([batch.write_page_ids, torch.full((pads,), -1, dtype=torch.int32)])
    offsets = torch.cat([batch.write_offsets, torch.zeros(pads, dtype=torch.int32)])
    return HeldGroupBatch(unread, unread, unread, pages, unread, writes, offsets, works=works)


def enough(batch: GroupBatch, tiling: Tiling, spare: int = 5) -> Capacity:
    tokens = int(batch.query_starts[-1]) + spare
    memory = Capacity(200, tokens, tiling.short_tokens)
    count = fill_items(lengths_in(batch), tiling, memory, np.zeros(memory.num_ints, np.int32))
    return replace(memory, items=count + spare)


def only_tiling(kernels: TritonKernels, batch: GroupBatch) -> Tiling:
    (tiling,) = kernels.tilings(batch)
    return tiling


@pytest.mark.parametrize(
    "shape",
    [pytest.param(s, id=name, marks=long_unless(name == "plain")) for name, s in SHAPES.items()],
)
@pytest.mark.parametrize("programs", [1, 3, 1 << 20], ids=str)
def test_neither_grid_nor_capacity_changes_a_bit(shape: Shape, programs: int) -> None:
    kernels, case = TritonKernels(BLOCKS), make_case(shape)
    stored, query = store(kernels, case), new_queries(case)
    exact = kernels.attend(stored.layer, stored.batch, query, shape.params)
    tiling = only_tiling(kernels, stored.batch)
    batch = held(stored.batch, tiling, enough(stored.batch, tiling), programs)
    size = kernels.scratch_size([batch])
    kernels.reserve(size, CPU)
    numbers, counters = kernels._scratch.get_reserved(size, CPU)
    for _ in range(2):
        numbers.fill_(torch.nan)
        output = kernels.attend(stored.layer, batch, query, shape.params)
        assert torch.equal(output, exact)
        assert not counters.any()


def test_pads_change_no_bit() -> None:
    kernels, shape = TritonKernels(BLOCKS), Shape(((20, 1), (9, 1)), 1, 1, 8)
    case = make_case(shape)
    stored, query = store(kernels, case), new_queries(case)
    exact = kernels.attend(stored.layer, stored.batch, query, shape.params)
    tiling = only_tiling(kernels, stored.batch)
    batch = held(stored.batch, tiling, Capacity(9, 4, 1), most_programs(CPU))
    kernels.reserve(kernels.scratch_size([batch]), CPU)
    padded = torch.cat([query, torch.full((2, 1, 8), torch.nan)])
    output = kernels.attend(stored.layer, batch, padded, shape.params)
    assert torch.equal(output[:2], exact)


class Recorded:
    """A kernel that does nothing; ``launches`` has the grid and pointers of each launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: self.launches.append((grid, *map(_pointer, arguments.items())))


def _pointer(argument: tuple[str, Any]) -> tuple[str, Any]:
    name, value = argument
    if not isinstance(value, torch.Tensor):
        return name, value
    return name, "output" if name in ("outputs", "maxima", "denominators") else value.data_ptr()


def test_launches_over_memory_are_alike_and_allocate_nothing_but_their_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels, shape = TritonKernels(BLOCKS), Shape(((300, 1), (40, 1)), 2, 1, 8)
    case = make_case(shape)
    stored, query = store(PortableKernels(), case), new_queries(case)
    recorded = Recorded()
    monkeypatch.setattr(launch, "attend_sections", recorded)
    kernels.attend(stored.layer, stored.batch, query, shape.params)
    tiling, capacity = only_tiling(kernels, stored.batch), Capacity(40, 2, 1)
    batch = held(stored.batch, tiling, capacity, 7)
    kernels.reserve(kernels.scratch_size([batch]), CPU)
    fewer = Lengths.of(lengths_of([(9, 1)]))
    memory = batch.works[tiling].num_items.view(-1)
    outputs = [torch.zeros(2, 2, 8) for _ in range(2)]
    allocations = iter(outputs)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: next(allocations))
    monkeypatch.delattr(torch, "zeros")
    for lengths in (lengths_in(stored.batch), fewer):
        memory.fill_(fill_items(lengths, tiling, capacity, np.zeros(capacity.num_ints, np.int32)))
        kernels.attend(stored.layer, batch, query, shape.params)
    assert next(allocations, None) is None
    eager, *captured = recorded.launches
    assert captured[0] == captured[1]
    assert (eager[0], captured[0][0]) == ((8,), (7,))


def test_what_captured_launches_use_is_reserved_for_good() -> None:
    kernels, shape = TritonKernels(BLOCKS), SHAPES["latents"]
    case = make_case(shape)
    stored, query = store(kernels, case), new_queries(case)
    kernels.attend(stored.layer, stored.batch, query, shape.params)
    tiling = only_tiling(kernels, stored.batch)
    small, large = (held(stored.batch, tiling, Capacity(n, 2, 1), 3) for n in (6, 7))
    with pytest.raises(ValueError, match="None is reserved"):
        kernels.attend(stored.layer, small, query, shape.params)
    size = kernels.scratch_size([small])
    assert size == ScratchSize(6 * 2 * (16 + 2), 2)
    assert size.size_bytes == 4 * (6 * 2 * 18 + 2)
    kernels.reserve(size, CPU)
    kernels.reserve(ScratchSize(10, 1), CPU)
    kernels.attend(stored.layer, small, query, shape.params)
    with pytest.raises(ValueError, match="is reserved for good"):
        kernels.reserve(kernels.scratch_size([large]), CPU)
    with pytest.raises(ValueError, match="reserve it before"):
        kernels.attend(stored.layer, large, query, shape.params)
    other = replace(shape.params, window_tokens=9)
    with pytest.raises(ValueError, match="works: none for Tiling"):
        kernels.attend(stored.layer, small, query, other)


def test_a_pass_tells_which_tilings_a_group_needs() -> None:
    kernels, shape = TritonKernels(BLOCKS), Shape(((20, 1),), 2, 1, 8)
    case = make_case(shape)
    stored, query = store(kernels, case), new_queries(case)
    assert kernels.tilings(stored.batch) == ()
    for window in (0, 9, 0):
        params = replace(shape.params, window_tokens=window)
        kernels.attend(stored.layer, stored.batch, query, params)
    assert [tiling.window_tokens for tiling in kernels.tilings(stored.batch)] == [0, 9]


def test_memory_that_does_not_fit_is_refused() -> None:
    capacity = Capacity(2, 1, 1)
    for flat in (torch.zeros(3, dtype=torch.int32), torch.zeros(capacity.num_ints)):
        with pytest.raises(ValueError, match=r"needs int32 \[28\]"):
            held_work(flat, capacity, 3)
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        held_work(torch.zeros(29, dtype=torch.int32)[1:], capacity, 3)


def test_a_request_without_context_gives_rows_of_zeros() -> None:
    shape = Shape(((20, 1), (0, 1)), 2, 1, 8, window_tokens=9, chunk_tokens=12, sinks=True)
    case = make_case(shape)
    query = torch.cat([new_queries(case), torch.ones(1, 2, 8)])
    for kernels in (TritonKernels(BLOCKS), PortableKernels()):
        stored = store(kernels, case)
        output = kernels.attend(stored.layer, stored.batch, query, shape.params)
        assert output[0].any()
        assert not output[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_nothing_is_written_for_a_pad(dtype: torch.dtype) -> None:
    case, new = make_case(Shape(((5, 1),), 2, 2, 8, pool_dtype=dtype)), torch.ones(3, 2, 8)
    for kernels in (TritonKernels(BLOCKS), PortableKernels()):
        stored, alone = store(kernels, case), store(kernels, case)
        pages, offsets = torch.tensor([[-1, 1, -1], [3, 2, 0]], dtype=torch.int32)
        padded = replace(stored.batch, write_page_ids=pages, write_offsets=offsets)
        kernels.write_kv(stored.layer, padded, new, new)
        only = replace(padded, write_page_ids=pages[1:2], write_offsets=offsets[1:2])
        kernels.write_kv(alone.layer, only, new[1:2], new[1:2])
        assert torch.equal(stored.layer.pool, alone.layer.pool)
