"""The baseline of MemServe §5.3.2: one polynomial for TTFT over (x, y), for all models."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PrefillPoint:
    """A measured exec(x, y).

    :param cached_ratio: y, 0 to 1.
    """

    prompt_tokens: int
    cached_ratio: float
    seconds: float


@dataclass(frozen=True)
class ArchLevel:
    """Coefficients of 1, x, xy, x², x²y and x²y²."""

    coefficients: tuple[float, ...]

    def prefill_seconds(self, prompt_tokens: int, cached_ratio: float) -> float:
        """Return exec(x, y)."""
        terms = _terms(prompt_tokens, cached_ratio)
        return sum(a * b for a, b in zip(self.coefficients, terms, strict=True))


def fit_arch_level(points: Sequence[PrefillPoint]) -> ArchLevel:
    """Fit by least squares of relative misses.

    :raises ValueError: with fewer points than coefficients.
    """
    rows = np.asarray([_terms(p.prompt_tokens, p.cached_ratio) for p in points], np.float64)
    if len(points) < len(_terms(1, 0.0)):
        raise ValueError(
            f"{len(points)} points do not determine {len(_terms(1, 0.0))} coefficients"
        )
    seconds = np.asarray([point.seconds for point in points], np.float64)
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = np.linalg.lstsq(rows / scale / seconds[:, None], np.ones(len(points)), rcond=None)[0]
    return ArchLevel(tuple((scaled / scale).tolist()))


def _terms(x: float, y: float) -> tuple[float, ...]:
    return (1.0, x, x * y, x * x, x * x * y, x * x * y * y)
