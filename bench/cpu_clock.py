"""A clock that stands still while others compute."""

import time


class CpuClock:
    """Seconds that this process computed: of use where others take most of the machine."""

    def now_seconds(self) -> float:
        """See :class:`kvell.clock.Clock`."""
        return time.process_time()
