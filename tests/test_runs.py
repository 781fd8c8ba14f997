"""Runs: cut where any column does not count up by one, and nowhere else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.runs import runs


def test_nothing_has_no_runs() -> None:
    assert list(runs([])) == []
    assert list(runs([], np.zeros(0, np.int32))) == []


def test_columns_are_cut_together() -> None:
    assert list(runs([4, 5, 6, 8])) == [(0, 3), (3, 1)]
    assert list(runs([4, 5, 6, 7], [1, 2, 9, 10])) == [(0, 2), (2, 2)]
    assert list(runs([3, 2, 1])) == [(0, 1), (1, 1), (2, 1)]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="same shape"):
        list(runs([1, 2], [1]))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_runs_tile_the_columns_and_are_maximal(rows: list[tuple[int, int]]) -> None:
    left, right = [a for a, _ in rows], [b for _, b in rows]
    found = list(runs(left, right))
    indices = [index for start, count in found for index in range(start, start + count)]
    assert indices == list(range(len(rows)))
    starts = {start for start, _ in found}
    for index in range(1, len(rows)):
        goes_on = (left[index], right[index]) == (left[index - 1] + 1, right[index - 1] + 1)
        assert goes_on == (index not in starts)
