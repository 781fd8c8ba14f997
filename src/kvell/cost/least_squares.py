"""Least squares with coefficients that are not negative (Lawson and Hanson, 1974, chapter 23).

Thirty lines beside a library of 35 MB that nothing else here needs.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ROUNDS = 8
"""Re-weightings of a robust fit; it moves little after four."""
SMALLEST_MISS = 0.005
"""Relative misses below this count alike; no measurement is better."""


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """x ≥ 0, float64 [n], that makes ``matrix @ x`` come closest to the target.

    :param matrix: [m, n].
    :param target: [m].
    """
    columns = matrix.shape[1]
    found = np.zeros(columns)
    free = np.zeros(columns, np.bool_)
    tolerance = 1e-10 * max(1e-300, float(np.abs(matrix.T @ target).max(initial=0.0)))
    for _ in range(6 * columns):
        slope = matrix.T @ (target - matrix @ found)
        slope[free] = -np.inf
        if free.all() or slope.max() <= tolerance:
            break
        free[int(slope.argmax())] = True
        found = _within(matrix, target, found, free)
    return found


def _within(matrix: Floats, target: Floats, found: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """Solve for the free coefficients; those that would turn negative become zero again."""
    while True:
        solved = np.zeros(len(found))
        solved[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        below = free & (solved <= 0)
        if not below.any():
            return solved
        steps = found[below] / np.maximum(found[below] - solved[below], 1e-300)
        found = found + steps.min(initial=1.0) * (solved - found)
        free &= found > 1e-15 * max(1.0, float(np.abs(found).max()))
        found = np.where(free, found, 0.0)


def relative_fit(matrix: Floats, target: Floats) -> Floats:
    """Coefficients, not negative, whose relative misses are small: the median miss, not the
    largest, since some measurements were disturbed.

    :param matrix: [m, n].
    :param target: float64 [m], above zero.
    """
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    rows = matrix / scale / target[:, None]
    weights = np.ones(len(target))
    for _ in range(ROUNDS):
        found = non_negative(rows * weights[:, None], weights)
        misses = np.abs(rows @ found - 1.0)
        weights = 1.0 / np.sqrt(np.maximum(misses, SMALLEST_MISS))
    return np.asarray(found / scale, np.float64)
