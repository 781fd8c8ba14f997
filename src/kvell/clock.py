"""Clocks as values: loops are given one; code that decides never sees one."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time in seconds."""

    def now_seconds(self) -> float:
        """Seconds since an arbitrary start; never runs backwards."""
        ...


class MonotonicClock:
    """The system's monotonic clock."""

    def now_seconds(self) -> float:
        """Seconds on the system's monotonic clock."""
        return time.monotonic()


class AttendedClock:
    """Time in which its owner was there: a gap between two looks counts for a bounded time.

    Whoever was stopped for a minute has not waited for a minute, and nobody was silent for that
    long as far as it can know.

    :param clock: that runs on without it.
    :param most_seconds: that a gap counts for.
    """

    def __init__(self, clock: Clock, most_seconds: float) -> None:
        self._clock, self._most_seconds = clock, most_seconds
        self._looked_seconds = clock.now_seconds()
        self._own_seconds = 0.0

    def now_seconds(self) -> float:
        """Seconds since the start that the owner was there; asking for them is a look."""
        now_seconds = self._clock.now_seconds()
        gap_seconds = max(0.0, now_seconds - self._looked_seconds)
        self._looked_seconds = now_seconds
        self._own_seconds += min(gap_seconds, self._most_seconds)
        return self._own_seconds


class VirtualClock:
    """A clock that moves only when told to, for the simulator and tests.

    :param start_seconds: its first time.
    """

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._now_seconds = start_seconds

    def now_seconds(self) -> float:
        """Seconds of virtual time."""
        return self._now_seconds

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (≥ 0).

        :raises ValueError: on a step backwards.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_seconds += seconds
