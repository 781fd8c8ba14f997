"""Whether an instance still gives signs of life: a pure decision."""

TICKS = 8
"""An instance is looked at so often within its deadline."""


class Watchdog:
    """Counts looks at an instance since its last sign of life.

    It counts looks, not seconds: a front that was itself stopped for a while looks once when it
    goes on, and does not take its own absence for its instances' silence.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self.interval_seconds = deadline_seconds / TICKS
        self._silent_looks = 0

    def beat(self) -> None:
        """Note a sign of life: a heartbeat, or any other event."""
        self._silent_looks = 0

    def look(self) -> bool:
        """Count a look, due every ``interval_seconds``; true once the deadline has passed."""
        self._silent_looks += 1
        return self._silent_looks > TICKS
