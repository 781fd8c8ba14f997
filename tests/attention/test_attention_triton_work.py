"""How steps are cut into programs, pages are copied, and wrong tensors are refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvell.attention.interface import AttendParams, GroupBatch, HostLengths, LayerPages
from tests.attention.cases import PAGE, Shape, Stored, lengths_of, make_case, new_queries, store

pytest.importorskip("triton", reason="Triton is not made for this system")

from kvell.attention.triton.backend import TritonKernels
from kvell.attention.triton.cutter import WorkCutter
from kvell.attention.triton.sizes import (
    Blocks,
    HeadShape,
    long_blocks,
    power_above,
    short_blocks,
    working_dtype,
)
from kvell.attention.triton.work import (
    ITEM,
    SHORT_TOKENS,
    TILE,
    Tiling,
    Work,
    cut,
)

CPU = torch.device("cpu")


def rows(table: torch.Tensor, names: tuple[str, ...]) -> list[dict[str, int]]:
    return [dict(zip(names, row, strict=True)) for row in table.tolist()]


def tiling(window: int = 0, chunk: int = 0, section: int = 32) -> Tiling:
    return Tiling(4, 8, section, PAGE, window, chunk)


requests_drawn = st.lists(
    st.integers(1, 3000).flatmap(lambda c: st.tuples(st.just(c), st.integers(0, min(c, 60)))),
    max_size=5,
)


@given(requests_drawn, st.sampled_from([0, 1, 40, 700]), st.sampled_from([0, 64]))
def test_every_new_token_is_in_one_tile_and_reads_all_it_may(
    requests: list[tuple[int, int]], window: int, chunk: int
) -> None:
    lengths, rule = lengths_of(requests), tiling(window, chunk)
    work = cut(lengths, rule, CPU)
    long, items = rows(work.tiles, TILE), rows(work.items, ITEM)
    short = {item["tile"]: item for item in items}
    assert len(short) == work.short_tiles
    covered = sorted(
        row
        for tile in (*long, *short.values())
        for row in range(tile["first_row"], tile["first_row"] + tile["rows"])
    )
    assert covered == list(range(sum(new for _, new in requests)))
    assert max((tile["rows"] for tile in short.values()), default=0) == work.short_tokens <= 4
    assert all(tile["rows"] <= 8 for tile in long)
    params = AttendParams(1.0, window, chunk_tokens=chunk)
    for number, tile in short.items():
        own = [item for item in items if item["tile"] == number]
        assert [items.index(own[0]), len(own)] == [tile["first_item"], tile["sections"]]
        ends = [item["section_begin"] for item in own[1:]] + [own[-1]["section_end"]]
        assert [item["section_end"] for item in own] == ends, "a gap between sections"
        assert own[0]["section_begin"] <= params.first_readable(tile["first_own"])
        assert own[-1]["section_end"] >= tile["first_own"] + tile["rows"]


def test_positions_and_tables_of_a_tile() -> None:
    lengths = lengths_of([(100, 1), (50, 20)], firsts=[0, 1])
    short, *long = rows(cut(lengths, tiling(), CPU).items, ITEM)[:1] + rows(
        cut(lengths, tiling(), CPU).tiles, TILE
    )
    assert (short["table"], short["begin"], short["end"], short["first_own"]) == (0, 0, 100, 99)
    assert [tile["first_own"] for tile in long] == [46, 38, 30], "those that read most first"
    assert {(tile["table"], tile["begin"], tile["end"]) for tile in long} == {(6, 16, 50)}
    assert [tile["rows"] for tile in long] == [4, 8, 8]


@pytest.mark.parametrize(("new", "is_short"), [(SHORT_TOKENS, True), (SHORT_TOKENS + 1, False)])
def test_a_requests_own_new_tokens_say_how_it_runs(new: int, is_short: bool) -> None:
    for others in ([], [(500, 1)], [(90, 90)]):
        work = cut(lengths_of([(200, new), *others]), tiling(), CPU)
        found = work.items if is_short else work.tiles
        assert any(row[4] == 0 for row in found.tolist())


@pytest.mark.parametrize(
    ("context", "section"), [(10, 32), (256, 32), (257, 64), (600, 128), (100_000, 128)]
)
def test_sections_grow_with_the_context(context: int, section: int) -> None:
    items = rows(cut(lengths_of([(context, 1)]), tiling(), CPU).items, ITEM)
    assert {item["section_end"] - item["section_begin"] for item in items} == {section}


def test_a_window_is_cut_by_what_it_reads() -> None:
    items = rows(cut(lengths_of([(100_000, 1)]), tiling(window=100), CPU).items, ITEM)
    assert {item["section_end"] - item["section_begin"] for item in items} == {32}
    assert len(items) == 4


def batch_of(lengths: HostLengths, host: HostLengths | None) -> GroupBatch:
    empty = torch.zeros(0, dtype=torch.int32)
    ids = torch.arange(int(lengths.table_starts[-1]), dtype=torch.int32)
    return GroupBatch(
        lengths.query_starts, lengths.context_lens, lengths.table_starts, ids,
        lengths.first_positions, empty, empty, host=host,
    )  # fmt: skip


def same(one: Work, other: Work) -> bool:
    return torch.equal(one.items, other.items) and torch.equal(one.tiles, other.tiles)


def test_a_batch_is_cut_once_for_all_its_layers() -> None:
    cutter, lengths = WorkCutter(), lengths_of([(100, 1), (50, 20)])
    batch = batch_of(lengths, None)
    work = cutter.work(batch, tiling())
    assert cutter.work(batch, tiling()) is work
    assert cutter.work(batch, tiling(window=20)) is not work
    told = cutter.work(batch_of(lengths, lengths), tiling())
    assert told is not work
    assert same(told, work)


def test_old_batches_are_forgotten() -> None:
    cutter = WorkCutter()
    for context in range(1, 60):
        lengths = lengths_of([(context, 1)])
        found = cutter.work(batch_of(lengths, lengths), tiling())
        assert same(found, cut(lengths, tiling(), CPU))


def test_block_sizes_fit_every_head() -> None:
    empty = torch.empty(0, dtype=torch.uint8)
    for kv_heads, heads, head_size, value_size in (
        (8, 32, 128, 0), (1, 128, 576, 512), (2, 14, 80, 0), (1, 71, 64, 0), (4, 4, 256, 0),
    ):  # fmt: skip
        for dtype in (torch.bfloat16, torch.float32, torch.int8):
            layer = LayerPages(empty, dtype, 64, 0, 16, kv_heads, head_size, value_size)
            shape = HeadShape.of(layer, heads)
            assert shape.size + shape.rest == head_size
            for choose in (short_blocks, long_blocks):
                blocks = choose(layer, shape, working_dtype(torch.bfloat16, layer))
                assert shape.parts(blocks) * shape.part_heads(blocks) >= shape.group
                assert 1 <= shape.tile_tokens(blocks) * shape.part_heads(blocks) <= blocks.rows
                assert shape.size_block >= shape.size
                assert power_above(blocks.rows) == blocks.rows >= 16


@pytest.mark.parametrize(
    ("query", "pool", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.int8, torch.bfloat16),
        (torch.float16, torch.float8_e4m3fn, torch.float16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
    ],
)
def test_products_are_as_wide_as_the_wider_side(
    query: torch.dtype, pool: torch.dtype, expected: torch.dtype
) -> None:
    empty = torch.empty(0, dtype=torch.uint8)
    assert working_dtype(query, LayerPages(empty, pool, 64, 0, 16, 1, 8)) == expected


@pytest.fixture(scope="module")
def stored() -> Stored:
    kernels = TritonKernels((Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)))
    return store(kernels, make_case(Shape(((20, 2),), 4, 2, 8)))


WRONG_LAYERS: dict[str, tuple[Callable[[LayerPages], LayerPages], str]] = {
    "a pool of floats": (lambda w: replace(w, pool=torch.zeros(64)), "pool: must be a flat uint8"),
    "a dtype unknown": (lambda w: replace(w, dtype=torch.float64), "float64"),
    "pages of nothing": (lambda w: replace(w, page_tokens=0), "must be positive"),
    "a latent too long": (lambda w: replace(w, value_size=9), "value_size: 9"),
    "half a number": (lambda w: replace(w, layer_offset_bytes=6), "not multiples of 4"),
    "a scale askew": (lambda w: replace(w, dtype=torch.int8, head_size=6), "not multiples of 4"),
}


@pytest.mark.parametrize(("spoil", "match"), WRONG_LAYERS.values(), ids=WRONG_LAYERS.keys())
def test_wrong_layers_are_refused(
    stored: Stored, spoil: Callable[[LayerPages], LayerPages], match: str
) -> None:
    layer = spoil(stored.layer)
    query = torch.zeros(2, 4, layer.head_size)
    with pytest.raises(ValueError, match=match):
        TritonKernels().attend(layer, stored.batch, query, AttendParams(1.0))


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda q: q.double(), "must be torch.float32"),
        (lambda q: q[..., :4], r"must be \[tokens, heads, 8\]"),
        (lambda q: q[:, :3], "3 heads over 2"),
        (lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), "contiguous"),
    ],
)
def test_wrong_queries_are_refused(
    stored: Stored, spoil: Callable[[torch.Tensor], torch.Tensor], match: str
) -> None:
    query = spoil(new_queries(make_case(Shape(((20, 2),), 4, 2, 8))))
    with pytest.raises(ValueError, match=match):
        TritonKernels().attend(stored.layer, stored.batch, query, AttendParams(1.0))


def test_sinks_of_another_length_are_refused(stored: Stored) -> None:
    params = AttendParams(1.0, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match=r"sinks: must be contiguous float32 \[4\]"):
        TritonKernels().attend(stored.layer, stored.batch, torch.zeros(2, 4, 8), params)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        (torch.zeros(1, 2, 8), None, "unless it is a part of the key"),
        (torch.zeros(1, 4, 8), torch.zeros(1, 2, 8), "4 heads, the layer has 2"),
        (torch.zeros(2, 2, 8), torch.zeros(2, 2, 8), "2 tokens"),
        (torch.zeros(1, 2, 8).bfloat16(), torch.zeros(1, 2, 8), "must be torch.float32 on"),
    ],
)
def test_wrong_writes_are_refused(
    stored: Stored, key: torch.Tensor, value: torch.Tensor | None, match: str
) -> None:
    one = torch.zeros(1, dtype=torch.int32)
    batch = replace(stored.batch, write_page_ids=one, write_offsets=one)
    with pytest.raises(ValueError, match=match):
        TritonKernels().write_kv(stored.layer, batch, key, value)
