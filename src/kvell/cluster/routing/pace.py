"""The pace of an instance: how its times to first tokens compare with those predicted."""

from math import exp, log

NEWEST_WEIGHT = 0.25
"""Weight of the newest request: the pace follows a change within some four requests."""
MOST = 20.0
"""Largest pace, and the inverse of the smallest: a request that waited for memory shows no pace."""


class Pace:
    """Moving geometric means of measured over predicted times.

    Prices are measured while an instance is alone.  Instances that share processors, other programs
    and text processing make it slower, by a factor that no price has.  There is one mean for each
    *crowd*: the number of instances of its host, itself included, that compute.
    """

    def __init__(self) -> None:
        self._logs: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def factor(self, crowd: int) -> float:
        """Return the seconds that a predicted second takes; 1 before any request.

        :param crowd: until a request of it was seen, the nearest one counts.
        """
        return exp(self._log(crowd))

    def note(self, predicted_seconds: float, measured_seconds: float, crowd: int) -> None:
        """Learn from a request's first token.

        :param predicted_seconds: the prediction, with the factor of that time.
        :param crowd: at the time of the prediction.
        """
        if predicted_seconds <= 0 or measured_seconds <= 0:
            return
        count = self._counts[crowd] = self._counts.get(crowd, 0) + 1
        weight = max(NEWEST_WEIGHT, 1.0 / count)
        moved = self._log(crowd) + weight * log(measured_seconds / predicted_seconds)
        self._logs[crowd] = max(-log(MOST), min(log(MOST), moved))

    def _log(self, crowd: int) -> float:
        if crowd in self._logs or not self._logs:
            return self._logs.get(crowd, 0.0)
        return self._logs[min(self._logs, key=lambda other: (abs(other - crowd), other))]
