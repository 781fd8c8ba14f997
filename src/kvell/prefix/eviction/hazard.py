"""The settings of the learned eviction rule, and the fit of its counts.

The compiled core keeps cached chunks in classes and counts which ages each class reached and at
which ages its chunks returned (``csrc/memory/hazard.h``; ``tests/oracle/eviction/hazard.py`` says
why). From these counts :func:`learn` makes an index: expected returns per time of residence, by
class and age. The core evicts the oldest chunk of the class whose oldest is worth least.

Before the first fit, and if all classes are alike, this is least recently used.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvell.pages.layout import GroupKind, Layout
from kvell.prefix.extension import _core

Floats = npt.NDArray[np.float64]

KINDS, HINTS, OUTPUTS, AGES = 6, 3, 6, 36
"""The sizes of the axes. Kinds: a partial last chunk; used once (first turn, later turn), twice,
three times, more. Hints: none, returns, does not. Output lengths. Age buckets. Within a prompt, a
deeper chunk never has a greater kind."""
NUM_CLASSES = KINDS * HINTS * OUTPUTS
CHUNK_TOKENS = 256
REMEMBERED = 8
"""The number of keys remembered, cached or not, per chunk that the cache holds."""
REFIT_REQUESTS = 50
"""The number of requests between two fits."""
HALF_LIFE_REQUESTS = 4_000


def age_bounds() -> npt.NDArray[np.int64]:
    """Return the first age of every bucket, and the end of the last [AGES + 1]: about √2 apart."""
    bounds = {0, 1} | {round(2 ** (power / 2)) for power in range(1, 2 * AGES)}
    return np.asarray(sorted(bounds)[: AGES + 1], np.int64)


BOUNDS: list[int] = age_bounds().tolist()


@dataclass(frozen=True)
class FittedHazard:
    """The result of a fit.

    :ivar index: the worth of a chunk, float64 [NUM_CLASSES, AGES].
    :ivar fading: the fraction of each count that stays.
    :ivar next_refit: the total of requests at which to fit again.
    """

    index: Floats
    fading: float
    next_refit: int


def learn(entered: Floats, returned: Floats, events: Floats, requests: int) -> FittedHazard:
    """Fit the index to the counts after ``requests`` requests; the core calls it rarely.

    :param entered: weight of chunks that reached each age, float64 [NUM_CLASSES * AGES].
    :param returned: weight of chunks that returned at each age, in the same shape.
    :param events: number of returns, float64 [NUM_CLASSES].
    """
    data = _core.fit(entered.tobytes(), returned.tobytes(), events.tobytes(), BOUNDS)
    return FittedHazard(
        np.frombuffer(data).reshape(NUM_CLASSES, AGES),
        0.5 ** (REFIT_REQUESTS / HALF_LIFE_REQUESTS),
        requests + REFIT_REQUESTS,
    )


Learn = Callable[[Floats, Floats, Floats, int], FittedHazard]
"""A function from counts to an index, such as :func:`learn`."""


class HazardRule:
    """The arguments of a compiled core that evicts by the learned rule; ages are in steps.

    :param capacity_tokens: the approximate number of tokens that the pool keeps.
    :param chunk_tokens: the number of prompt tokens that are counted together.
    :param first_refit: the number of requests before the first fit.
    :param learn: fits the counts, and returns when to fit again.
    """

    def __init__(
        self,
        capacity_tokens: int,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        first_refit: int = REFIT_REQUESTS,
        learn: Learn = learn,
    ) -> None:
        self.chunks = max(1, -(-capacity_tokens // chunk_tokens))
        self.learn = learn
        self.settings = (REMEMBERED * self.chunks, chunk_tokens, first_refit, BOUNDS)
        """``HazardSettings`` in hazard.h."""

    def refit(
        self, entered: bytes, returned: bytes, events: bytes, requests: int
    ) -> tuple[bytes, float, int]:
        """Call ``learn`` for the core, whose float64 arrays are passed as bytes."""
        counts = [np.frombuffer(each) for each in (entered, returned, events)]
        result = self.learn(counts[0], counts[1], counts[2], requests)
        return np.ascontiguousarray(result.index).tobytes(), result.fading, result.next_refit


def capacity_tokens(layout: Layout) -> int:
    """Return an estimate of the number of tokens that the pool keeps.

    A token takes its bytes in all groups that hold every token. Without such groups, it takes its
    bytes in all groups that count tokens, or else in all groups.
    """
    whole = [group for group in layout.groups if group.kind is GroupKind.FULL]
    counted = whole or [group for group in layout.groups if group.kind.counts_tokens]
    sizes = [g.page_stride_bytes / g.page_tokens for g in counted or layout.groups]
    return max(1, int(layout.pool_bytes / sum(sizes)))
