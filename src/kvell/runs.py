"""Runs of consecutive numbers, which can be copied, mapped or marked in one piece."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def runs(*columns: ArrayLike) -> Iterator[tuple[int, int]]:
    """Yield (start index, length) of each maximal run in which every column counts up by one.

    :param columns: integers, one-dimensional and of one length, in the order to be cut.
    :raises ValueError: if their lengths differ.
    """
    rows: NDArray[Any] = np.stack([np.asarray(column) for column in columns])
    if not rows.shape[1]:
        return
    breaks = np.flatnonzero((np.diff(rows) != 1).any(axis=0)) + 1
    edges = [0, *breaks.tolist(), rows.shape[1]]
    for start, end in pairwise(edges):
        yield start, end - start
