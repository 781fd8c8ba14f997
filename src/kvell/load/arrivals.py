"""Random arrival times, think times and disconnections of clients."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvell.simulator.traces.rows import TraceRow

_ARRIVALS, _THINKING, _HANGING_UP = range(1, 4)
"""The separate random streams, so that one option does not change the draws of the others."""


def retime(
    rows: Sequence[TraceRow], *, rate: float | None, time_scale: float = 1.0, seed: int = 0
) -> list[TraceRow]:
    """Return the rows with new arrival times, the first at 0.

    :param rate: requests per second of independent clients (a Poisson process), in the order
        of the rows; ``inf`` sends all together, None keeps the rows' own times.
    :param time_scale: factor by which the rows' own times are multiplied.
    """
    if rate is None:
        first_s = rows[0].arrival_s
        times = [(row.arrival_s - first_s) * time_scale for row in rows]
    elif math.isinf(rate):
        times = [0.0] * len(rows)
    else:
        gaps = _draw(seed, _ARRIVALS).exponential(1 / rate, len(rows))
        gaps[0] = 0.0
        times = np.cumsum(gaps).tolist()
    return [replace(row, arrival_s=at) for row, at in zip(rows, times, strict=True)]


def think_times(count: int, mean_seconds: float, seed: int = 0) -> list[float]:
    """Draw the seconds from the previous answer to each request, exponentially distributed."""
    drawn: list[float] = _draw(seed, _THINKING).exponential(mean_seconds, count).tolist()
    return drawn


def hang_ups(rows: Sequence[TraceRow], share: float, seed: int = 0) -> list[int | None]:
    """Draw the number of pieces after which each client disconnects; None if it stays.

    :param share: share of the clients that disconnect (0 to 1), uniformly before the last token.
    """
    draw = _draw(seed, _HANGING_UP)
    leaves = draw.random(len(rows)) < share
    where = draw.random(len(rows))
    return [
        max(1, int(part * row.output_tokens)) if gone else None
        for row, gone, part in zip(rows, leaves.tolist(), where.tolist(), strict=True)
    ]


def _draw(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng((seed, stream))
