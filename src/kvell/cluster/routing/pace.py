"""The pace of an instance: how its times to first tokens compare with those predicted."""

from dataclasses import dataclass
from math import exp, log

NEWEST_WEIGHT = 0.25
"""Weight of the newest request: the pace follows a change within some four requests."""
SLOW_WEIGHT = 0.05
"""The same for how the pace depends on the size of requests."""
PRIOR = 1.0
"""Weight of the assumption that it does not: about that of four requests of different sizes."""
MOST = 20.0
"""Largest pace, and the inverse of the smallest: a request that waited for memory shows no pace."""


@dataclass(frozen=True)
class RequestPrice:
    """The prediction of a request, by prices alone.

    :param seconds: time to its first token; above 0.
    :param crowd: number of instances of its host that compute, its own included.
    """

    seconds: float
    crowd: int = 1


class Pace:
    """The logarithm of measured over priced times, learnt from request to request.

    Prices are measured while an instance is alone.  Instances that share processors, other programs
    and text processing make it slower, by a factor that no price has.  There is one mean for each
    crowd.  A calibration beside other programs may price long prompts too high and short ones too
    low, or the reverse; so a slope over the logarithm of the priced time is learnt too.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._size = 0.0
        self._sizes_seen = 0
        self._squares = self._products = 0.0

    def factor(self, priced: RequestPrice) -> float:
        """Return the seconds that a priced second takes; 1 before any request.

        Until a request of the crowd was seen, the nearest crowd counts.
        """
        return exp(self._log(priced))

    def note(self, priced: RequestPrice, predicted_seconds: float, measured_seconds: float) -> None:
        """Learn from a request's first token.

        :param predicted_seconds: the prediction, with the factor.
        """
        if predicted_seconds <= 0 or measured_seconds <= 0:
            return
        factor = _bounded(self._log(priced) + log(measured_seconds) - log(predicted_seconds))
        self._sizes_seen += 1
        self._size += max(SLOW_WEIGHT, 1.0 / self._sizes_seen) * (log(priced.seconds) - self._size)
        larger = log(priced.seconds) - self._size
        mean = self._mean(priced.crowd)
        self._squares += larger * larger - SLOW_WEIGHT * self._squares
        self._products += larger * (factor - mean) - SLOW_WEIGHT * self._products
        count = self._counts[priced.crowd] = self._counts.get(priced.crowd, 0) + 1
        weight = max(NEWEST_WEIGHT, 1.0 / count)
        self._means[priced.crowd] = mean + weight * (factor - self._slope * larger - mean)

    @property
    def _slope(self) -> float:
        return max(-1.0, min(1.0, self._products / (self._squares + PRIOR)))

    def _log(self, priced: RequestPrice) -> float:
        larger = log(priced.seconds) - self._size
        return _bounded(self._mean(priced.crowd) + self._slope * larger)

    def _mean(self, crowd: int) -> float:
        if crowd in self._means or not self._means:
            return self._means.get(crowd, 0.0)
        return self._means[min(self._means, key=lambda other: (abs(other - crowd), other))]


def _bounded(factor: float) -> float:
    return max(-log(MOST), min(log(MOST), factor))
