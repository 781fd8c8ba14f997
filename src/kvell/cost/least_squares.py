"""Least squares with coefficients that are not negative (Lawson and Hanson, 1974, chapter 23).

These thirty lines replace a library of 35 MB that nothing else here needs.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

ROUNDS = 8
"""Re-weightings of a robust fit; the result changes little after four."""
SMALLEST_MISS = 0.005
"""Relative misses below this count alike; no measurement is better."""


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """Return x ≥ 0, float64 [n], for which ``matrix @ x`` comes closest to the target.

    :param matrix: [m, n].
    :param target: [m].
    """
    columns = matrix.shape[1]
    solution = np.zeros(columns)
    free = np.zeros(columns, np.bool_)
    tolerance = 1e-10 * max(1e-300, float(np.abs(matrix.T @ target).max(initial=0.0)))
    for _ in range(6 * columns):
        slope = matrix.T @ (target - matrix @ solution)
        slope[free] = -np.inf
        if free.all() or slope.max() <= tolerance:
            break
        free[int(slope.argmax())] = True
        solution = _within(matrix, target, solution, free)
    return solution


def _within(matrix: Floats, target: Floats, point: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """Solve for the free coefficients; those that would turn negative become zero again."""
    while True:
        solved = np.zeros(len(point))
        solved[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        below = free & (solved <= 0)
        if not below.any():
            return solved
        steps = point[below] / np.maximum(point[below] - solved[below], 1e-300)
        point = point + steps.min(initial=1.0) * (solved - point)
        free &= point > 1e-15 * max(1.0, float(np.abs(point).max()))
        point = np.where(free, point, 0.0)


def relative_fit(matrix: Floats, target: Floats) -> Floats:
    """Return non-negative coefficients with a small median relative miss.

    The median counts rather than the largest miss, since some measurements were disturbed.

    :param matrix: [m, n].
    :param target: float64 [m], above zero.
    """
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    rows = matrix / scale / target[:, None]
    weights = np.ones(len(target))
    for _ in range(ROUNDS):
        solution = non_negative(rows * weights[:, None], weights)
        misses = np.abs(rows @ solution - 1.0)
        weights = 1.0 / np.sqrt(np.maximum(misses, SMALLEST_MISS))
    return np.asarray(solution / scale, np.float64)
