"""A context whose first sections lie elsewhere has the bits of a local one; partials merge."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvell.attention.interface import AttentionKernels, Partial
from kvell.attention.merge import merge, merge_partials
from kvell.attention.portable import PortableKernels
from kvell.attention.sections import SectionKernels, SectionRecords
from kvell.vocabulary import SECTION_TOKENS
from tests.attention.cases import (
    Case,
    Shape,
    Stored,
    attend,
    dense_attention,
    dense_scores,
    make_case,
    new_queries,
    starts_of,
    store,
    values_read,
)
from tests.attention.conftest import each
from tests.attention.lent import (
    Held,
    Split,
    attend_lent,
    elsewhere_of,
    hold,
    local_part,
    partials_of,
    queries_of,
)
from tests.depth import few

HEADS = {
    "MHA": Shape((), heads=3, kv_heads=3, head_size=32),
    "GQA": Shape((), heads=6, kv_heads=2, head_size=64),
    "GQA of many rows": Shape((), heads=32, kv_heads=2, head_size=16),
    "MQA": Shape((), heads=5, kv_heads=1, head_size=40),
    "latents": Shape((), heads=5, kv_heads=1, head_size=40, value_size=24),
}
DTYPES = (torch.float32, torch.bfloat16)
STORED = (None, torch.float32, torch.int8, torch.float8_e4m3fn)
MOST_SECTIONS, CREDITORS = 4, 3


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, Split]:
    """Context, new tokens, and where the sections before those lie."""
    before = draw(st.integers(0, MOST_SECTIONS * SECTION_TOKENS + 40))
    new = draw(st.sampled_from([1, 1, 1, 2, 7, 40, 120]))
    away = draw(st.integers(0, before // SECTION_TOKENS))
    cuts = sorted(draw(st.lists(st.integers(0, away), max_size=3)))
    runs = len(cuts) + 1
    creditors = draw(st.lists(st.integers(0, CREDITORS - 1), min_size=runs, max_size=runs))
    return before + new, new, Split((0, *cuts, away), tuple(creditors))


@st.composite
def lent_cases(draw: st.DrawFn) -> tuple[Case, list[Split]]:
    drawn = draw(st.lists(requests(), min_size=1, max_size=3))
    shape = replace(
        HEADS[draw(st.sampled_from(sorted(HEADS)))],
        requests=tuple((context, new) for context, new, _ in drawn),
        page_tokens=draw(st.sampled_from([8, 16, 64, 512])),
        dtype=draw(st.sampled_from(DTYPES)),
        pool_dtype=draw(st.sampled_from(STORED)),
        softcap=draw(st.sampled_from([0.0, 3.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
    return make_case(shape), [split for _, _, split in drawn]


def decode(before: int, split: Split) -> tuple[Case, list[Split]]:
    return make_case(Shape(((before + 1, 1),), heads=6, kv_heads=2)), [split]


@pytest.mark.parametrize("kernels", each(threads=(1, 2)))
@given(drawn=lent_cases())
@example(drawn=decode(2048, Split((0, 4), (0,))))  # nothing is local but the row itself
@example(drawn=decode(2100, Split((0, 1, 1, 4), (0, 1, 1))))  # with an empty run
@example(drawn=decode(1600, Split((0, 1, 2, 3), (0, 1, 0))))  # one creditor's runs have a gap
@example(drawn=decode(300, Split()))  # nothing is elsewhere
@few()
def test_what_lies_elsewhere_changes_no_bit(
    kernels: SectionKernels, drawn: tuple[Case, list[Split]]
) -> None:
    case, splits = drawn
    local = attend(kernels, case)
    assert not local.isnan().any()
    assert torch.equal(attend_lent(kernels, case, splits), local)


LONG = Shape(((1900, 1), (700, 1), (1600, 300)), heads=6, kv_heads=2)
SPLITS = [Split((0, 2, 3), (0, 1)), Split((0, 1), (1,)), Split((0, 1, 2), (2, 0))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_chunk_beside_decodes(kernels: SectionKernels, dtype: torch.dtype) -> None:
    case = make_case(replace(LONG, dtype=dtype))
    assert torch.equal(attend_lent(kernels, case, SPLITS), attend(kernels, case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_a_prompt_equal_the_whole(kernels: SectionKernels, dtype: torch.dtype) -> None:
    """Rows are computed in one step or in two, with the same sections elsewhere."""
    whole = make_case(Shape(((1200, 170),), heads=6, kv_heads=2, dtype=dtype))
    split = [Split((0, 1, 2), (0, 1))]
    half = replace(
        whole,
        shape=replace(whole.shape, requests=((1100, 70),)),
        queries=[whole.queries[0][:1100]],
    )
    expected = attend_lent(kernels, whole, split)
    assert torch.equal(attend_lent(kernels, half, split), expected[:70])


def test_other_records_give_another_result(kernels: SectionKernels) -> None:
    """The equality above is not of results that ignore what is elsewhere."""
    case = make_case(LONG)
    elsewhere = elsewhere_of(kernels, case, SPLITS, placement=5)
    held = local_part(case, SPLITS)
    stored = hold(kernels, case, held, placement=5)
    query = queries_of(case, held)
    right = kernels.attend(stored.layer, stored.batch, query, case.shape.params, elsewhere)
    for of in range(3):  # maximum, denominator, output
        values = elsewhere.values.clone()
        values[..., of] += 0.5
        wrong = SectionRecords(elsewhere.starts, values)
        other = kernels.attend(stored.layer, stored.batch, query, case.shape.params, wrong)
        assert (other != right).any((1, 2)).all()


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_a_record_holds_maximum_denominator_and_output(
    kernels: SectionKernels, heads: Shape
) -> None:
    case = make_case(replace(heads, requests=((1700, 3),), softcap=5.0))
    held = [Held(0, SECTION_TOKENS, 3 * SECTION_TOKENS)]
    (records,) = partials_of(kernels, case, held, placement=1)
    assert records.shape == (2, 3, heads.heads, 2 + (heads.value_size or heads.head_size))
    for i, record in enumerate(records.double()):
        read = slice((1 + i) * SECTION_TOKENS, (2 + i) * SECTION_TOKENS)
        scores = dense_scores(case, 0, read)
        maximum = scores.amax(2)
        weights = (scores - maximum[..., None]).exp()
        output = torch.einsum("ths,shd->thd", weights, values_read(case, 0, read))
        torch.testing.assert_close(record[..., 0], maximum, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(record[..., 1], weights.sum(2), atol=1e-3, rtol=1e-5)
        torch.testing.assert_close(record[..., 2:], output, atol=1e-3, rtol=1e-5)


def test_a_part_from_the_first_token_on_is_one_record(kernels: SectionKernels) -> None:
    case = make_case(Shape(((1700, 2),), heads=4, kv_heads=2))
    held = [Held(0, 0, 3 * SECTION_TOKENS), Held(0, 0, 0), Held(0, SECTION_TOKENS, 1536)]
    folded, empty, rest = partials_of(kernels, case, held, placement=2)
    assert [len(part) for part in (folded, empty, rest)] == [1, 0, 2]


def test_sinks_are_in_no_record(kernels: SectionKernels) -> None:
    plain = make_case(Shape(((1200, 2),), heads=4, kv_heads=2))
    with_sinks = replace(plain, shape=replace(plain.shape, sinks=True))
    held = [Held(0, 0, 2 * SECTION_TOKENS)]
    one, other = (partials_of(kernels, case, held, placement=3) for case in (plain, with_sinks))
    assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_records_depend_on_neither_threads_nor_batch(dtype: torch.dtype) -> None:
    native = pytest.importorskip("kvell.attention.native", reason="torch kernels have no threads")
    case = make_case(replace(LONG, dtype=dtype))
    held = [Held(2, 0, 1024), Held(0, 512, 1536), Held(1, 0, 512), Held(0, 0, 1536)]
    alone = [partials_of(native.NativeKernels(1), case, [one], placement=4)[0] for one in held]
    for threads in (1, 2, 5):
        together = partials_of(native.NativeKernels(threads), case, held, placement=6)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_requests_without_query_rows_have_no_records(kernels: SectionKernels) -> None:
    case = make_case(Shape(((1200, 0), (1200, 1)), heads=4, kv_heads=2))
    splits = [Split((0, 2), (0,)), Split((0, 2), (0,))]
    assert elsewhere_of(kernels, case, splits, placement=7).starts.tolist() == [0, 0, 1]
    assert torch.equal(attend_lent(kernels, case, splits), attend(kernels, case))


TOLERANCE = 1e-6


def part_of(stored: Stored, first_page: int, last_page: int) -> Stored:
    """The same step over pages [first_page, last_page) of every request."""
    batch = stored.batch
    begins, ends = batch.table_starts[:-1].tolist(), batch.table_starts[1:].tolist()
    tables = [
        batch.page_ids[min(begin + first_page, end) : min(begin + last_page, end)]
        for begin, end in zip(begins, ends, strict=True)
    ]
    firsts = batch.first_positions + torch.tensor(
        [min(first_page, end - begin) for begin, end in zip(begins, ends, strict=True)],
        dtype=torch.int32,
    )
    cut = replace(
        batch,
        table_starts=starts_of([len(table) for table in tables]),
        page_ids=torch.cat(tables),
        first_positions=firsts,
    )
    return Stored(stored.layer, cut)


def partials(kernels: AttentionKernels, case: Case, cuts: list[int]) -> list[Partial]:
    stored = store(kernels, case)
    bounds = [0, *cuts, 1 << 20]
    return [
        kernels.attend_partial(part.layer, part.batch, new_queries(case), case.shape.params)
        for part in (part_of(stored, begin, end) for begin, end in pairwise(bounds))
    ]


SHAPES = {
    "full": Shape(((200, 3), (37, 37), (90, 1))),
    "sinks": Shape(((200, 3), (37, 37)), sinks=True),
    "window and softcap": Shape(((200, 3), (300, 20)), window_tokens=70, softcap=4.0),
    "long": Shape(((1500, 2),), heads=4, kv_heads=1, head_size=128, page_tokens=8),
}


@pytest.mark.parametrize("cuts", [[], [1], [3, 5], [2, 2, 40]], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_merged_parts_equal_the_whole(
    kernels: AttentionKernels, shape: Shape, cuts: list[int]
) -> None:
    case = make_case(shape)
    merged = merge(partials(kernels, case, cuts), shape.params.sinks)
    stored = store(kernels, case)
    whole = kernels.attend(stored.layer, stored.batch, new_queries(case), shape.params)
    torch.testing.assert_close(merged, whole, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(merged.double(), dense_attention(case), atol=5e-6, rtol=1e-5)


def test_an_empty_part_says_so(kernels: AttentionKernels) -> None:
    case = make_case(Shape(((20, 2),)))
    _, empty = partials(kernels, case, [5])
    assert torch.equal(empty.output, torch.zeros(2, 9, 64))
    assert torch.equal(empty.maximum, torch.full((2, 9), -torch.inf))
    assert torch.equal(empty.denominator, torch.zeros(2, 9))


def test_partials_are_float32_and_leave_sinks_out(kernels: AttentionKernels) -> None:
    plain = make_case(Shape(((50, 2),), dtype=torch.bfloat16))
    with_sinks = replace(plain, shape=replace(plain.shape, sinks=True))
    (one,), (other,) = (partials(kernels, case, []) for case in (plain, with_sinks))
    assert one.output.dtype == one.maximum.dtype == one.denominator.dtype == torch.float32
    assert torch.equal(one.output, other.output)
    assert torch.equal(one.denominator, other.denominator)


def test_a_partial_says_what_its_scores_were(kernels: AttentionKernels) -> None:
    case = make_case(Shape(((40, 1),), heads=1, kv_heads=1))
    (partial,) = partials(kernels, case, [])
    scores = (case.keys[0][:, 0] @ case.queries[0][-1, 0]) * case.shape.params.scale
    torch.testing.assert_close(partial.maximum[0, 0], scores.max(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        partial.denominator[0, 0], (scores - scores.max()).exp().sum(), atol=1e-4, rtol=1e-5
    )


@given(pages=st.lists(st.integers(0, 13), max_size=5), seed=st.integers(0, 50))
@few()
def test_any_cut_merges(pages: list[int], seed: int) -> None:
    shape = Shape(((200, 2), (70, 1)), heads=4, kv_heads=2, head_size=16, sinks=True, seed=seed)
    case = make_case(shape)
    merged = merge(partials(PortableKernels(), case, sorted(pages)), shape.params.sinks)
    torch.testing.assert_close(merged.double(), dense_attention(case), atol=2e-6, rtol=1e-5)


def random_partials(count: int) -> list[Partial]:
    generator = torch.Generator().manual_seed(count)
    return [
        Partial(
            torch.randn(3, 4, 8, generator=generator),
            torch.randn(3, 4, generator=generator) * 30,
            torch.rand(3, 4, generator=generator) + 0.5,
        )
        for _ in range(count)
    ]


def test_merging_in_two_stages_is_merging_at_once() -> None:
    parts = random_partials(5)
    staged = merge([merge_partials(parts[:2]), merge_partials(parts[2:])])
    torch.testing.assert_close(staged, merge(parts), atol=TOLERANCE, rtol=TOLERANCE)


def test_order_matters_only_to_rounding() -> None:
    parts = random_partials(6)
    torch.testing.assert_close(merge(parts[::-1]), merge(parts), atol=TOLERANCE, rtol=TOLERANCE)


def test_all_parts_empty_is_zero_not_nan() -> None:
    nothing = Partial(torch.zeros(2, 3, 8), torch.full((2, 3), -torch.inf), torch.zeros(2, 3))
    assert torch.equal(merge([nothing, nothing], torch.zeros(3)), torch.zeros(2, 3, 8))


def test_a_loud_sink_silences_the_rest() -> None:
    (part,) = random_partials(1)
    assert merge([part], torch.full((4,), 1000.0)).abs().max() == 0
    torch.testing.assert_close(merge([part], torch.full((4,), -1000.0)), part.output)


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        merge([])
