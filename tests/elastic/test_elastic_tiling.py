"""Chunks and large pages over the same bytes: held against counting byte by byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.elastic.tiling import Tiling, covering_bytes, tiling
from kvell.prefix.interface import WITHHELD

tilings = st.builds(tiling, st.integers(1, 12), st.integers(1, 9), st.integers(1, 9))


def bytes_of(index: int, size: int) -> set[int]:
    return set(range(index * size, (index + 1) * size))


def chunks_under(tiled: Tiling, large: int) -> range:
    return range(int(tiled.first_chunk[large]), int(tiled.end_chunk[large]))


@given(tilings)
def test_over_and_under_are_those_that_share_a_byte(tiled: Tiling) -> None:
    for chunk in range(tiled.num_chunks):
        mine = bytes_of(chunk, tiled.chunk_bytes)
        over = [n for n in range(tiled.num_large) if mine & bytes_of(n, tiled.large_page_bytes)]
        assert list(tiled.larges_over(chunk)) == over
        assert all(chunk in chunks_under(tiled, large) for large in over)
    for large in range(tiled.num_large):
        assert all(large in tiled.larges_over(chunk) for chunk in chunks_under(tiled, large))


@given(tilings, st.data())
def test_a_chunk_costs_what_the_dearest_large_page_over_it_costs(
    tiled: Tiling, data: st.DataObject
) -> None:
    numbers = st.lists(st.integers(0, 9), min_size=tiled.num_large, max_size=tiled.num_large)
    order = np.asarray(data.draw(numbers), np.int64)
    expected = [
        max((int(order[n]) for n in tiled.larges_over(chunk)), default=WITHHELD)
        for chunk in range(tiled.num_chunks)
    ]
    assert tiled.chunk_order(order).tolist() == expected


@given(tilings, st.data())
def test_large_pages_over_lent_chunks_are_withheld(tiled: Tiling, data: st.DataObject) -> None:
    flags = st.lists(st.booleans(), min_size=tiled.num_chunks, max_size=tiled.num_chunks)
    lent = np.asarray(data.draw(flags))
    expected = [any(lent[list(chunks_under(tiled, n))]) for n in range(tiled.num_large)]
    assert tiled.withheld(lent).tolist() == expected


def test_large_pages_that_reach_beyond_the_pool_are_refused() -> None:
    with pytest.raises(ValueError, match="beyond the last chunk"):
        Tiling(2, 4, 3, 3)


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_whole_chunk_fits_in_each_covering_page(large: int, chunk: int) -> None:
    """Wherever it lies; and no smaller multiple of the page does that."""

    def covers(size: int) -> bool:
        starts = range(0, size * chunk, size)
        return all(-(-start // chunk) * chunk + chunk <= start + size for start in starts)

    size = covering_bytes(large, chunk)
    assert size % large == 0
    assert covers(size)
    assert not any(covers(smaller) for smaller in range(large, size, large))


@pytest.mark.parametrize(
    ("large", "covering"), [(256, 2048), (360, 4320), (384, 3072), (2048, 2048), (6656, 6656)]
)
def test_pages_of_models_that_cover_a_chunk_of_2_mib(large: int, covering: int) -> None:
    assert covering_bytes(large << 10, 2 << 20) == covering << 10
