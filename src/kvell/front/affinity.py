"""Where the front's thread runs: not on the processor of the thread that plans and computes.

Each token wakes the front, and the system likes to put it beside the process that woke it: the
instance's own thread, which then waits until the front is done, while another processor has nothing
to do.
"""

import contextlib
import os


class Affinity:
    """Of the thread that makes it and calls it.

    A pass has its caller on the first processor (``csrc/forward/places.h``).  Processes that are
    started meanwhile would have the same place, so it is taken only while none is.
    """

    def __init__(self) -> None:
        has_places = hasattr(os, "sched_getaffinity")
        self._all = frozenset(os.sched_getaffinity(0)) if has_places else frozenset[int]()

    def take(self) -> None:
        """All processors but the first, if there are several."""
        self._run_on(self._all - {min(self._all, default=0)})

    def give_back(self) -> None:
        """All processors that it had."""
        self._run_on(self._all)

    def _run_on(self, processors: frozenset[int]) -> None:
        if processors:
            with contextlib.suppress(OSError):  # they were taken from us: the system knows better
                os.sched_setaffinity(0, processors)
