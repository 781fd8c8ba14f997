"""Bounds on what one grammar may take, which the system itself enforces."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent ends."""


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent ends, even while it is stopped.

    Elsewhere than on Linux it ends when it next listens, for the parent's end is closed then.

    :param parent: process id; if it is not the parent any more, this process ends now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def bound_memory(room_bytes: int) -> None:
    """Let this process take so much beyond what it has; then its allocations fail."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data_bytes, _ = _sizes_bytes()
    if data_bytes:
        most_bytes = data_bytes + room_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))


def anonymous_bytes() -> int:
    """Memory of this process that is no file's; 0 where the system does not say."""
    return _sizes_bytes()[1]


@contextlib.contextmanager
def bounded_seconds(seconds: float) -> Iterator[None]:
    """Let the system end this process by SIGPROF once the body has taken so much of a processor.

    Only the process's own work counts: a busy machine makes no grammar complex.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _sizes_bytes() -> tuple[int, int]:
    """Private writable memory, mapped and present."""
    try:
        pages = [int(number) for number in Path("/proc/self/statm").read_text().split()]
    except OSError:
        return 0, 0
    page_bytes = resource.getpagesize()
    return pages[5] * page_bytes, (pages[1] - pages[2]) * page_bytes
