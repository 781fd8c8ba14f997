"""The pace of an instance: how its times to first tokens compare with those predicted."""

from math import exp, log

NEWEST_WEIGHT = 0.25
"""Weight of the newest request: the pace follows a change within some four requests."""
MOST = 20.0
"""Largest pace, and the inverse of the smallest: a request that waited for memory shows no pace."""


class Pace:
    """A moving geometric mean of measured over predicted times.

    Prices are measured while an instance is alone.  Instances that share processors, other programs
    and text processing make it slower, by a factor that no price has.
    """

    def __init__(self) -> None:
        self._log = 0.0
        self._count = 0

    @property
    def factor(self) -> float:
        """Seconds that a predicted second takes; 1 before any request."""
        return exp(self._log)

    def note(self, predicted_seconds: float, measured_seconds: float) -> None:
        """Learn from a request's first token.

        :param predicted_seconds: the prediction, with the factor of that time.
        """
        if predicted_seconds <= 0 or measured_seconds <= 0:
            return
        self._count += 1
        weight = max(NEWEST_WEIGHT, 1.0 / self._count)
        moved = self._log + weight * log(measured_seconds / predicted_seconds)
        self._log = max(-log(MOST), min(log(MOST), moved))
