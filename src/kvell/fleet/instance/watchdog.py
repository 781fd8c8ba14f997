"""The decision whether an instance still gives signs of life; pure."""

TICKS = 8
"""Number of looks at an instance within its deadline."""


class Watchdog:
    """A counter of looks at an instance since its last event.

    It counts looks, not seconds: a front that was itself stopped looks once when it continues, and
    does not mistake its own absence for its instances' silence.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self.interval_seconds = deadline_seconds / TICKS
        self._silent_looks = 0

    def beat(self) -> None:
        """Note a heartbeat, or any other event."""
        self._silent_looks = 0

    def look(self) -> bool:
        """Count a look, due every ``interval_seconds``; return whether the deadline has passed."""
        self._silent_looks += 1
        return self._silent_looks > TICKS
