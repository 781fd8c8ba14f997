"""The decision whether an instance still gives signs of life; pure."""

from kvell.engine.protocol.messages import HEARTBEAT_SECONDS

TICKS = 8
"""Number of looks at an instance within its deadline."""
QUIET_HEARTBEATS = 4
"""Heartbeats in a row that an instance has missed if it is quiet."""


class Watchdog:
    """A counter of looks at an instance since its last event.

    It counts looks, not seconds: a front that was itself stopped looks once when it continues, and
    does not mistake its own absence for its instances' silence.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self.interval_seconds = deadline_seconds / TICKS
        self._silent_looks = 0

    @property
    def is_quiet(self) -> bool:
        silent_seconds = (self._silent_looks - 1) * self.interval_seconds
        return silent_seconds >= QUIET_HEARTBEATS * HEARTBEAT_SECONDS

    def beat(self) -> None:
        self._silent_looks = 0

    def look(self) -> bool:
        """Count a look, due every ``interval_seconds``; return whether the deadline has passed."""
        self._silent_looks += 1
        return self._silent_looks > TICKS
