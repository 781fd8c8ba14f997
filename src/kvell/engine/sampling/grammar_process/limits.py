"""Limits of a grammar's memory and time, enforced by the operating system."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""The option of Linux's prctl for the signal that a process gets when its parent ends."""


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent ends, even while it is stopped.

    On other systems than Linux it ends at its next read, when the parent's socket is closed.

    :param parent: process id; if that is no longer the parent, this process ends now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def bound_memory(room_bytes: int) -> None:
    """Limit this process to its current memory plus ``room_bytes``; then allocations fail."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data_bytes, _ = _sizes_bytes()
    if data_bytes:
        most_bytes = data_bytes + room_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process; 0 if the system does not report it."""
    return _sizes_bytes()[1]


@contextlib.contextmanager
def bounded_seconds(seconds: float) -> Iterator[None]:
    """End this process by SIGPROF once the body has taken ``seconds`` of processor time.

    Only the process's own time counts, so a busy machine does not make a grammar too complex.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _sizes_bytes() -> tuple[int, int]:
    try:
        pages = [int(number) for number in Path("/proc/self/statm").read_text().split()]
    except OSError:
        return 0, 0
    page_bytes = resource.getpagesize()
    return pages[5] * page_bytes, (pages[1] - pages[2]) * page_bytes
