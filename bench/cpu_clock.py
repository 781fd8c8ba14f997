"""A clock of CPU time: it stands still while other processes compute."""

import time


class CpuClock:
    """Seconds that this process has computed; useful where others take most of the machine."""

    def now_seconds(self) -> float:
        """CPU seconds of this process; see :class:`kvell.clock.Clock`."""
        return time.process_time()
