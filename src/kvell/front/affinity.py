"""The processors of the front's thread: not that of the thread that plans and computes.

Each token wakes the front, and the operating system tends to run the front on the processor of the
process that woke it: the instance's own thread, which then waits until the front is done, while
another processor is idle.
"""

import contextlib
import os


class Affinity:
    """The processor affinity of the thread that makes and calls this object.

    A pass has its caller on the first processor (``csrc/forward/places.h``).  Processes that are
    started meanwhile would inherit the affinity, so it is set only while none is started.
    """

    def __init__(self) -> None:
        has_places = hasattr(os, "sched_getaffinity")
        self._all = frozenset(os.sched_getaffinity(0)) if has_places else frozenset[int]()

    def take(self) -> None:
        self._run_on(self._all - {min(self._all, default=0)})

    def give_back(self) -> None:
        """Run on all processors that the thread had."""
        self._run_on(self._all)

    def _run_on(self, processors: frozenset[int]) -> None:
        if processors:
            with contextlib.suppress(OSError):  # no longer permitted: the system decides
                os.sched_setaffinity(0, processors)
