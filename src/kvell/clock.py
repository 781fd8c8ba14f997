"""Clocks as values: loops receive one; code that decides never sees one."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time in seconds."""

    def now_seconds(self) -> float:
        """Return seconds since an arbitrary start; they never decrease."""
        ...


class MonotonicClock:
    """The system's monotonic clock."""

    now_seconds = staticmethod(time.monotonic)
    """Return seconds of the system's monotonic clock."""


class AttendedClock:
    """Time in which its owner ran: a gap between two readings counts at most ``most_seconds``.

    An owner that was stopped for a minute has not waited for a minute, and cannot conclude that a
    peer was silent for that long.

    :param clock: the underlying clock, which never stops.
    """

    def __init__(self, clock: Clock, most_seconds: float) -> None:
        self._clock, self._most_seconds = clock, most_seconds
        self._looked_seconds = clock.now_seconds()
        self._own_seconds = 0.0

    def now_seconds(self) -> float:
        """Return the seconds that count so far; each call is a reading."""
        now_seconds = self._clock.now_seconds()
        gap_seconds = max(0.0, now_seconds - self._looked_seconds)
        self._looked_seconds = now_seconds
        self._own_seconds += min(gap_seconds, self._most_seconds)
        return self._own_seconds


class VirtualClock:
    """A clock that moves only on request, for the simulator and tests.

    :param start_seconds: its first time.
    """

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._now_seconds = start_seconds

    def now_seconds(self) -> float:
        """Return seconds of virtual time."""
        return self._now_seconds

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (≥ 0).

        :raises ValueError: on a step backwards.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_seconds += seconds
