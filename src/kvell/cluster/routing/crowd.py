"""How much the instances of one host slow each other, since they share its processors."""

from math import exp, log
from typing import NamedTuple

from kvell.cluster.routing.pace import LEAST_SECONDS

WEIGHT = 0.2
"""Weight of the newest prompt."""
MOST_COMPUTING = 64
"""Larger numbers of computing instances count as this one."""
MOST_MISS = 0.5
"""Largest miss that counts, in logarithms: one prompt that waited for memory shows nothing."""


class CrowdTime(NamedTuple):
    """A moment, and the seconds before it with each number of computing instances."""

    at_seconds: float
    totals: tuple[float, ...]


class Crowd:
    """The instances of one host: how many of them compute, and how that slows each one.

    Prices are measured while one instance computes.  The slowdown is learnt for each number of
    computing instances; before any prompt shows it, that of the nearest number counts.

    :ivar computing: number of instances that compute now.
    """

    def __init__(self) -> None:
        self.computing = 0
        self._at_seconds: float | None = None
        self._totals = [0.0, 0.0]
        self._logs: dict[int, float] = {1: 0.0}

    def begin(self) -> None:
        """Note that an instance begins to compute; call :meth:`pass_to` before."""
        self.computing += 1

    def end(self) -> None:
        self.computing -= 1

    def time(self, now: float) -> CrowdTime:
        """Return the time ``now``; time passes up to it."""
        self.pass_to(now)
        return CrowdTime(now, tuple(self._totals))

    def pass_to(self, now: float) -> None:
        if self._at_seconds is not None:
            number = min(self.computing, MOST_COMPUTING)
            self._totals += [0.0] * (number + 1 - len(self._totals))
            self._totals[number] += max(0.0, now - self._at_seconds)
        self._at_seconds = now

    def slowdown(self, *, more: int = 0) -> float:
        """Return the seconds that a second of an instance's work takes now.

        :param more: number of further instances that begin now.
        """
        return exp(self._log(self.computing + more))

    def alone_seconds(self, since: CrowdTime, until: CrowdTime) -> float:
        spent = self._spent(since, until)
        return sum(seconds / exp(self._log(number)) for number, seconds in spent)

    def note(self, since: CrowdTime, until: CrowdTime, expected_seconds: float) -> None:
        """Learn from a prompt that was computed between two times.

        :param expected_seconds: its time without other instances; above 0.
        """
        spent = self._spent(since, until)
        whole = sum(seconds for _, seconds in spent)
        alone = self.alone_seconds(since, until)
        if alone < LEAST_SECONDS:
            return
        miss = max(-MOST_MISS, min(MOST_MISS, log(alone / expected_seconds)))
        for number, seconds in spent:
            if number > 1:
                learnt = self._log(number) + WEIGHT * seconds / whole * miss
                self._logs[number] = max(0.0, learnt)

    def _spent(self, since: CrowdTime, until: CrowdTime) -> list[tuple[int, float]]:
        """Return the seconds with each number of computing instances, at least one."""
        before = since.totals + (0.0,) * (len(until.totals) - len(since.totals))
        passed = [end - begin for begin, end in zip(before, until.totals, strict=True)]
        return [(max(1, number), seconds) for number, seconds in enumerate(passed) if seconds > 0]

    def _log(self, number: int) -> float:
        if number in self._logs:
            return self._logs[number]
        return self._logs[min(self._logs, key=lambda other: (abs(other - number), other))]
