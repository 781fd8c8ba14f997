"""What a row may not read takes no part in its arithmetic, not even times zero."""

from dataclasses import replace

import pytest
import torch

from kvell.attention.interface import AttentionKernels
from kvell.attention.sections import SectionKernels
from kvell.attention.spans import page_views
from tests.attention.cases import Shape, make_case, new_queries, store
from tests.attention.poison import (
    NAN,
    check,
    place,
    poison_each,
    poison_the_rest,
    rows_that_read,
    spoil,
)
from tests.attention.section_records import section_records

FLOATS = (torch.float32, torch.bfloat16)

# A prompt's chunk whose rows end inside a tile, and one that spans two spans.
SHAPES = {
    "full": Shape(((70, 40),), heads=4, kv_heads=2, head_size=16),
    "one head each": Shape(((70, 40),), heads=2, kv_heads=2, head_size=40),
    "many rows of a head": Shape(((90, 50),), heads=9, kv_heads=1, head_size=32),
    "drafts": Shape(((69, 4),), heads=6, kv_heads=3, head_size=64),
    "many drafts of a head": Shape(((66, 5),), heads=8, kv_heads=1, head_size=32),
    "window": Shape(((90, 40),), heads=3, kv_heads=1, head_size=32, window_tokens=21),
    "drafts in a window": Shape(((90, 3),), heads=4, kv_heads=2, head_size=32, window_tokens=33),
    "chunks": Shape(((90, 40),), heads=4, kv_heads=2, head_size=16, chunk_tokens=24),
    "capped, with sinks": Shape(((70, 20),), heads=4, kv_heads=2, softcap=4.0, sinks=True),
    "latents": Shape(((70, 33),), heads=5, kv_heads=1, head_size=40, value_size=24),
    "int8": Shape(((70, 33),), heads=4, kv_heads=2, head_size=32, pool_dtype=torch.int8),
    "fp8": Shape(((70, 33),), heads=4, kv_heads=2, head_size=32, pool_dtype=torch.float8_e4m3fn),
    "pages of 8": Shape(((70, 33),), heads=2, kv_heads=2, head_size=32, page_tokens=8),
}

LAYOUTS = ((1, 1), (2, 1), (4, 2), (9, 3), (8, 1), (16, 2), (20, 1))
SIZES = (16, 40, 64, 80, 128)
RAGGED = (
    ((64, 32), (33, 33)),
    ((131, 67), (5, 1)),
    ((70, 7), (65, 2), (64, 64)),
    ((17, 17), (129, 65)),
    ((600, 90),),
)
EVERY = [
    pytest.param(
        Shape(requests, heads=heads, kv_heads=kv_heads, head_size=size, dtype=dtype),
        marks=pytest.mark.long,
    )
    for dtype in FLOATS
    for heads, kv_heads in LAYOUTS
    for size in SIZES
    for requests in RAGGED
]


# Each shape with one dtype in the fast suite, with both in the long one.
SPARSE = [
    pytest.param(
        replace(shape, dtype=dtype),
        id=f"{name}-{dtype}",
        marks=[pytest.mark.long] if i % 2 != number else [],
    )
    for i, (name, shape) in enumerate(SHAPES.items())
    for number, dtype in enumerate(FLOATS)
]
# Each position alone costs more: every other shape in the fast suite.
HALF = [
    one._replace(marks=[pytest.mark.long]) if i % 4 > 1 else one for i, one in enumerate(SPARSE)
]


@pytest.fixture(params=FLOATS, ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.mark.parametrize("shape", HALF)
def test_a_position_spoils_the_rows_that_read_it_and_no_other(
    kernels: AttentionKernels, shape: Shape
) -> None:
    poison_each(kernels, shape)


@pytest.mark.parametrize("shape", [*SPARSE, *EVERY])
def test_what_follows_a_row_never_reaches_it(kernels: AttentionKernels, shape: Shape) -> None:
    poison_the_rest(kernels, shape)


@pytest.mark.parametrize("name", ["full", "many rows of a head", "drafts", "window", "int8"])
def test_a_query_that_is_no_number_gives_none(
    kernels: AttentionKernels, name: str, dtype: torch.dtype
) -> None:
    shape = replace(SHAPES[name], dtype=dtype, requests=((600, 40), (30, 1)))
    case = make_case(shape)
    stored, query = store(kernels, case), new_queries(case)
    sound = kernels.attend(stored.layer, stored.batch, query, shape.params)
    for row in (0, 17, 39, 40):
        for head in (0, shape.heads - 1):
            broken = query.clone()
            broken[row, head] = NAN
            output = kernels.attend(stored.layer, stored.batch, broken, shape.params)
            spoiled = torch.zeros(query.shape[:2], dtype=torch.bool)
            spoiled[row, head] = True
            check(output, sound, spoiled, f"row {row}, head {head}")


def test_one_number_of_a_value_spoils_one_number_of_its_readers(
    kernels: AttentionKernels, dtype: torch.dtype
) -> None:
    shape = replace(SHAPES["full"], dtype=dtype)
    case = make_case(shape)
    stored, query = store(kernels, case), new_queries(case)
    sound = kernels.attend(stored.layer, stored.batch, query, shape.params)
    page, row = place(stored, 0, 44)
    page_views(stored.layer)[1][page, 0, row, 5] = NAN
    output = kernels.attend(stored.layer, stored.batch, query, shape.params)
    spoiled = torch.zeros(output.shape, dtype=torch.bool)
    spoiled[rows_that_read(shape, 0, 44), :2, 5] = True
    check(output, sound, spoiled, "one number")


@pytest.mark.parametrize("records", ["one record", "a record each"])
def test_records_of_sections_carry_what_is_no_number(
    kernels: SectionKernels, dtype: torch.dtype, records: str
) -> None:
    """A creditor's sections, with a key that is NaN or a query row that is."""
    begin = 0 if records == "one record" else 512
    shape = Shape(((1100, 3),), heads=4, kv_heads=2, head_size=32, dtype=dtype)
    case = make_case(shape)
    stored, query = store(kernels, case), new_queries(case)
    pages = slice(begin // 16, 1024 // 16)
    lent = replace(
        stored.batch,
        table_starts=torch.tensor([0, pages.stop - pages.start], dtype=torch.int32),
        page_ids=stored.batch.page_ids[pages].contiguous(),
        first_positions=torch.tensor([pages.start], dtype=torch.int32),
    )
    spoil(stored, 0, 700, 0)
    found = section_records(kernels, stored.layer, lent, query, shape.params)
    assert found.values[..., 1].isnan().all()
    query[1] = NAN
    stored = store(kernels, case)
    values = section_records(kernels, stored.layer, lent, query, shape.params).of(0, 3)
    assert values[:, 1, :, 1].isnan().all()
    assert not values[:, [0, 2]].isnan().any()
