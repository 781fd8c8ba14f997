"""Records and sections that do not fit are refused, with what is wrong and what to pass instead."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvell.attention.interface import AttendParams, GroupBatch
from kvell.attention.sections import SectionKernels, SectionRecords
from tests.attention.cases import Shape, Stored, make_case
from tests.attention.lent import Held, Split, elsewhere_of, hold, local_part, queries_of

CASE = make_case(Shape(((1100, 2), (1200, 3), (100, 1)), heads=4, kv_heads=2, head_size=16))
SPLITS = [Split((0, 1, 2), (0, 1)), Split((0, 2), (0,)), Split()]
QUERY = queries_of(CASE, local_part(CASE, SPLITS))
SCALE = AttendParams(1.0)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def moved(batch: GroupBatch, pages: int) -> GroupBatch:
    """With the first request's table that many pages later."""
    firsts = batch.first_positions + ints(pages, 0, 0)
    return replace(batch, first_positions=firsts)


Change = Callable[[SectionRecords], SectionRecords]

WRONG_RECORDS: dict[str, tuple[Change, str]] = {
    "doubles": (
        lambda r: replace(r, values=r.values.double()),
        "elsewhere.values: is torch.float64 .* pass contiguous float32 in host memory",
    ),
    "strided": (
        lambda r: replace(r, values=r.values.transpose(0, 1).contiguous().transpose(0, 1)),
        "elsewhere.values: .* with strides .* pass contiguous float32",
    ),
    "of another head": (
        lambda r: replace(r, values=r.values[..., :-1].contiguous()),
        r"elsewhere.values: is \[7, 4, 17\]; pass \[rows, 4, 18\]",
    ),
    "of fewer heads": (
        lambda r: replace(r, values=r.values[:, :2].contiguous()),
        r"elsewhere.values: is \[7, 2, 18\]; pass \[rows, 4, 18\]",
    ),
    "flat": (
        lambda r: replace(r, values=r.values.flatten()),
        r"elsewhere.values: is \[504\]; pass \[rows, 4, 18\]",
    ),
    "wide starts": (
        lambda r: replace(r, starts=r.starts.long()),
        r"elsewhere.starts: is torch.int64 \[4\]; pass int32 \[4\]",
    ),
    "starts of another batch": (
        lambda r: replace(r, starts=r.starts[:-1].clone()),
        r"elsewhere.starts: is torch.int32 \[3\]; pass int32 \[4\]",
    ),
    "strided starts": (
        lambda r: replace(r, starts=r.starts.repeat_interleave(2)[::2]),
        "elsewhere.starts: .* pass contiguous starts",
    ),
    "starts beyond the values": (
        lambda r: replace(r, starts=r.starts + ints(0, 0, 0, 3)),
        "elsewhere.starts: runs from 0 to 10; .* from 0 to the 7 rows of values",
    ),
    "starts that fall": (
        lambda r: replace(r, starts=ints(0, 10, 7, 7)),
        "elsewhere.starts: request 0 has 5 records of the 2 sections before its table",
    ),
    "negative lengths": (
        lambda r: replace(r, starts=ints(0, 2, -1, 7)),
        "elsewhere.starts: request 1 has -3 rows of records for 3 query rows",
    ),
    "not as many for each row": (
        lambda r: replace(r, starts=ints(0, 3, 7, 7)),
        "elsewhere.starts: request 0 has 3 rows of records for 2 query rows; pass as many",
    ),
    "none of a request": (
        lambda r: replace(r, starts=ints(0, 4, 4, 4), values=r.values[:4]),
        "elsewhere.starts: request 1 has 0 records of the 2 sections before its table; pass one",
    ),
    "of a request that is local": (
        lambda r: SectionRecords(ints(0, 4, 7, 8), torch.cat([r.values, r.values[:1]])),
        "elsewhere.starts: request 2 has 1 records of the 0 sections before its table",
    ),
}


def lent(kernels: SectionKernels) -> tuple[Stored, SectionRecords]:
    stored = hold(kernels, CASE, local_part(CASE, SPLITS), placement=0)
    return stored, elsewhere_of(kernels, CASE, SPLITS, placement=0)


@pytest.mark.parametrize(("change", "message"), WRONG_RECORDS.values(), ids=WRONG_RECORDS.keys())
def test_records_that_do_not_fit(kernels: SectionKernels, change: Change, message: str) -> None:
    stored, elsewhere = lent(kernels)
    with pytest.raises(ValueError, match=message):
        kernels.attend(stored.layer, stored.batch, QUERY, SCALE, change(elsewhere))


def test_a_table_that_begins_inside_a_section(kernels: SectionKernels) -> None:
    stored, elsewhere = lent(kernels)
    message = "first_positions: request 0's table begins at position 1008, .* a multiple of 512"
    with pytest.raises(ValueError, match=message):
        kernels.attend(stored.layer, moved(stored.batch, -1), QUERY, SCALE, elsewhere)


def test_a_query_row_among_what_is_elsewhere(kernels: SectionKernels) -> None:
    stored, elsewhere = lent(kernels)
    batch = replace(stored.batch, context_lens=ints(1025, 1200, 100))
    message = "context_lens: request 0 has a query row at position 1023, among the 1024 remote"
    with pytest.raises(ValueError, match=message):
        kernels.attend(stored.layer, batch, QUERY, SCALE, elsewhere)


def test_records_of_a_request_without_query_rows(kernels: SectionKernels) -> None:
    stored, elsewhere = lent(kernels)
    batch = replace(stored.batch, query_starts=ints(0, 2, 2, 3), context_lens=ints(1100, 1197, 100))
    message = "elsewhere.starts: request 1 has no query rows; leave its records out"
    with pytest.raises(ValueError, match=message):
        kernels.attend(stored.layer, batch, QUERY[:3], SCALE, elsewhere)


@pytest.mark.parametrize(
    "params",
    [replace(SCALE, window_tokens=700), replace(SCALE, chunk_tokens=900)],
    ids=["window", "chunk"],
)
def test_windows_and_chunks(kernels: SectionKernels, params: AttendParams) -> None:
    stored, elsewhere = lent(kernels)
    with pytest.raises(ValueError, match="elsewhere: this layer reads a window or chunk"):
        kernels.attend(stored.layer, stored.batch, QUERY, params, elsewhere)
    held = hold(kernels, CASE, [Held(0, 0, 512)], placement=0)
    with pytest.raises(ValueError, match=r"params: .* use groups of full attention only"):
        kernels.partials(held.layer, held.batch, QUERY[:2], params)


WRONG_SECTIONS = {
    "half a section": (Held(0, 0, 256), "table_starts: request 0's table covers 256 tokens; pass"),
    "from inside a section": (
        Held(0, 256, 768),
        "first_positions: request 0's table begins at position 256, inside a section",
    ),
    "with the query rows": (
        Held(2, 0, 512),
        "context_lens: request 0 has a query row at position 99, inside or before its sections",
    ),
    "behind the query rows": (
        Held(2, 512, 512),
        "context_lens: request 0 has a query row at position 99, .* end at 512",
    ),
}


@pytest.mark.parametrize(("held", "message"), WRONG_SECTIONS.values(), ids=WRONG_SECTIONS.keys())
def test_partials_of_what_are_no_sections(
    kernels: SectionKernels, held: Held, message: str
) -> None:
    whole = make_case(replace(CASE.shape, requests=((1100, 2), (1200, 3), (600, 1))))
    stored = hold(kernels, whole, [held], placement=0)
    context, _ = CASE.shape.requests[held.request]
    batch = replace(stored.batch, context_lens=ints(context))
    with pytest.raises(ValueError, match=message):
        kernels.partials(stored.layer, batch, queries_of(CASE, [held]), SCALE)


def test_partials_of_wrong_queries_and_batches() -> None:
    native = pytest.importorskip("kvell.attention.native", reason="these checks guard pointers")
    kernels = native.NativeKernels()
    held = Held(0, 0, 512)
    stored = hold(kernels, CASE, [held], placement=0)
    query = queries_of(CASE, [held])
    for wrong, message in (
        (query.double(), "query: must be torch.float32 or torch.bfloat16"),
        (query[..., :8], "query: must be [tokens, heads, 16]"),
        (query[:1], "query_starts: must run from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            kernels.partials(stored.layer, stored.batch, wrong, SCALE)
    far = replace(stored.batch, page_ids=stored.batch.page_ids + 1000)
    with pytest.raises(ValueError, match="page_ids"):
        kernels.partials(stored.layer, far, query, SCALE)
    short = replace(stored.batch, table_starts=ints(0))
    with pytest.raises(ValueError, match="starts need 2 entries"):
        kernels.partials(stored.layer, short, query, SCALE)
