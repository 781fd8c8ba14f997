"""Positions of tokens in a prompt with image grids: (time, row, column) instead of one number.

::

    token      0  1  2 │ 3  4  5  6  7  8 │ 9  10      an image of 2 × 3 tokens at 3
    time       0  1  2 │ 3  3  3  3  3  3 │ 6  7
    row        0  1  2 │ 3  3  3  4  4  4 │ 6  7
    column     0  1  2 │ 3  4  5  3  4  5 │ 6  7

The text continues after the longer side, so a later token's position depends on all images before
it, and on nothing else (Qwen2-VL, arXiv:2409.12191, §2.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

AXES = 3


@dataclass(frozen=True)
class Grid:
    """An image in a prompt.

    :param rows, columns: shape of its tokens, which are ordered row by row.
    """

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def skipped(self) -> int:
        """The lag of positions behind token indices after the image."""
        return self.rows * self.columns - max(self.rows, self.columns)


def grid_positions(start: int, count: int, grids: Sequence[Grid]) -> npt.NDArray[np.int64]:
    """Return positions of tokens ``start … start+count-1`` of a request, int64 [3, count].

    :param grids: the request's images in order; those that begin later have no effect.
    """
    tokens = np.arange(start, start + count)
    positions = np.tile(tokens, (AXES, 1))
    skipped = 0
    for grid in grids:
        low, high = (min(max(edge, start), start + count) for edge in (grid.start, grid.end))
        inside = tokens[low - start : high - start] - grid.start
        at = grid.start - skipped
        rows, columns = np.divmod(inside, grid.columns)
        positions[:, low - start : high - start] = at + np.stack([0 * inside, rows, columns])
        positions[:, high - start :] -= grid.skipped
        skipped += grid.skipped
    return positions
