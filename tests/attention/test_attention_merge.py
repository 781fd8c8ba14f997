"""Partials merge to the whole, however the context was cut."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvell.attention.interface import AttentionKernels, Partial
from kvell.attention.merge import merge, merge_partials
from kvell.attention.portable import PortableKernels
from tests.attention.cases import (
    Case,
    Shape,
    Stored,
    dense_attention,
    make_case,
    new_queries,
    starts_of,
    store,
)
from tests.depth import few

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
