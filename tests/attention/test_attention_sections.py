"""A context whose first sections lie elsewhere gives the bits that it gives where all is local."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvell.attention.sections import SectionKernels, SectionRecords
from kvell.vocabulary import SECTION_TOKENS
from tests.attention.cases import Case, Shape, attend, dense_scores, make_case, values_read
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
    """One decode row behind ``before`` tokens."""
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
