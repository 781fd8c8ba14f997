"""What both parts of the bench use: seconds of calls, their spread, and texts."""

import time
from collections.abc import Callable
from statistics import median

import numpy as np

Figures = dict[str, float]


def spread(values: list[float], per: float = 1.0, unit: float = 1e6) -> Figures:
    """Median, lowest and highest, divided by ``per``; seconds become microseconds by default."""
    told = [one * unit / per for one in values]
    return {"median": median(told), "low": min(told), "high": max(told)}


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def text_of(number: int, tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """A text that shares no prefix with another number's."""
    return np.arange(number * tokens, (number + 1) * tokens, dtype=np.int32)
