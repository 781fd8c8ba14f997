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
