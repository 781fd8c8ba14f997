"""The items of short requests: compiled code against numpy, in memory of a given capacity."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvell.attention.choice import kernels_for
from kvell.attention.portable import PortableKernels
from kvell.attention.triton import filling
from kvell.attention.triton.filling import fill_in_numpy, fill_items
from kvell.attention.triton.held import Capacity
from kvell.attention.triton.work import HEADER_INTS, ITEM, Lengths, Tiling
from tests.attention.cases import PAGE, Shape, attend, dense_attention, lengths_of, make_case
from tests.attention.conftest import implementations

requests_drawn = st.lists(
    st.integers(0, 3000).flatmap(lambda c: st.tuples(st.just(c), st.integers(0, 16))), max_size=6
)


@given(
    requests_drawn,
    st.sampled_from([0, 1, 40, 700]),
    st.sampled_from([0, 64]),
    st.sampled_from([1, 3, 16]),
    st.integers(0, 5),
)
def test_items_are_cut_as_in_numpy(
    requests: list[tuple[int, int]], window: int, chunk: int, tokens: int, behind: int
) -> None:
    """Draft tokens, contexts of pads, and tables that begin late."""
    firsts = [min(behind, context // PAGE) for context, _ in requests]
    lengths = Lengths.of(lengths_of(requests, firsts))
    tiling, capacity = Tiling(tokens, 8, 32, PAGE, window, chunk), Capacity(4000, 100, tokens)
    ours, theirs = (np.full(capacity.num_ints, 7, np.int32) for _ in range(2))
    count = fill_items(lengths, tiling, capacity, ours)
    assert count == fill_in_numpy(lengths, tiling, capacity, theirs) == ours[0]
    end = HEADER_INTS + count * len(ITEM)
    assert np.array_equal(ours[HEADER_INTS:end], theirs[HEADER_INTS:end])
    assert set(ours[end:].tolist()) <= {7}, "something behind the items was written"


def test_items_are_written_by_compiled_code() -> None:
    assert filling.IS_COMPILED


@pytest.mark.parametrize("fill", [fill_items, fill_in_numpy])
@pytest.mark.parametrize(
    ("capacity", "new", "match"),
    [
        (Capacity(7, 1, 1), 1, "too few items"),
        (Capacity(8, 0, 1), 1, "too few tiles"),
        (Capacity(20, 4, 1), 2, "tokens of a tile"),
        (Capacity(200, 200, 4), 17, "new tokens"),
    ],
)
def test_work_beyond_its_capacity_is_refused(
    fill: Any, capacity: Capacity, new: int, match: str
) -> None:
    lengths = Lengths.of(lengths_of([(256, new)]))
    with pytest.raises(ValueError, match=match):
        fill(lengths, Tiling(4, 8, 32, PAGE, 0, 0), capacity, np.zeros(capacity.num_ints, np.int32))


RAGGED = ((37, 37), (130, 1), (65, 2))


@pytest.mark.parametrize("size", [2, 10, 18, 50])
@pytest.mark.parametrize("pool_dtype", [None, torch.int8, torch.bfloat16])
def test_portable_kernels_take_any_size(size: int, pool_dtype: torch.dtype | None) -> None:
    case = make_case(Shape(RAGGED, 4, 2, size, pool_dtype=pool_dtype))
    torch.testing.assert_close(
        attend(PortableKernels(), case).double(), dense_attention(case), atol=5e-6, rtol=1e-5
    )


@pytest.mark.parametrize("size", [2, 10, 12, 50])
def test_a_size_is_taken_exactly_or_left_to_portable_kernels(size: int) -> None:
    for kernels in implementations():
        assert kernels_for(kernels, [64, size], torch.float32).name == "portable"
        assert kernels_for(kernels, [64, 8, 0], torch.float32) is kernels
