"""A thread that commits a pool's chunks while the first requests are already served.

The first touch of a chunk takes milliseconds: touching all of a large pool would delay the first
request by seconds.  The thread commits the chunks in order.  Between steps the engine's loop reads
the number of committed chunks, and reports it to the core through the journal.
"""

import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from kvell.device.chunks import ChunkDevice, Ints
from kvell.errors import TryLater

PATIENT = 19
"""The lowest priority, which uses only idle processor time."""
BATCH_CHUNKS = 4
"""Chunks committed between two reports of progress; about 20 ms."""
REST_SECONDS = 0.5
"""A patient warmer's pause between chunks while a step computes.  Even at the lowest priority it
takes a core for milliseconds from compute threads, which meet at barriers several times per
millisecond: with 1/20 of the time it made steps twice as long."""


class Warmer:
    """A thread that commits chunks in order, until all are committed or this object is freed.

    :param chunks: the uncommitted chunks, in the order in which the pool will use them.
    """

    def __init__(
        self,
        device: ChunkDevice,
        chunks: Sequence[int],
        *,
        is_patient: bool = False,
        rest_seconds: float = REST_SECONDS,
    ) -> None:
        """:param is_patient: no caller waits for it, so it leaves the cores to steps that compute.
        :param rest_seconds: a patient warmer's pause between chunks while a step computes.
        """
        self._progress = _Progress()
        self._told = 0
        rest = rest_seconds if is_patient else None
        arguments = (device, np.asarray(chunks, np.int32), self._progress, rest)
        self.thread = threading.Thread(target=_warm, args=arguments, daemon=True)
        # Also runs at exit: a thread returning from a system call during shutdown aborts Python.
        weakref.finalize(self, _stop, self._progress, self.thread)
        self.thread.start()

    def take(self) -> int:
        done = self._progress.done
        new = done - self._told
        self._told = done
        return new

    @property
    def is_done(self) -> bool:
        return self._progress.is_over

    def computes(self, is_computing: bool) -> None:
        """Set whether a step computes now; a patient warmer then rests between chunks."""
        progress = self._progress
        if progress.is_disturbing != is_computing:
            with progress.changed:
                progress.is_disturbing = is_computing
                progress.changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until more chunks are committed or the thread has ended, for at most ``seconds``."""
        with self._progress.changed:
            self._progress.changed.wait_for(
                lambda: self._progress.done > self._told or self._progress.is_over, seconds
            )

    def finish(self) -> None:
        with self._progress.changed:
            self._progress.changed.wait_for(lambda: self._progress.is_over)


class _Progress:
    """The state that the thread shares with its owner."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.done = 0
        self.is_over = False
        self.stops = False
        self.is_disturbing = False

    def pause(self, seconds: float) -> None:
        """Wait until no step computes or the warmer stops, for at most ``seconds``."""
        with self.changed:
            self.changed.wait_for(lambda: self.stops or not self.is_disturbing, seconds)

    def add(self, count: int, *, is_over: bool = False) -> None:
        with self.changed:
            self.done += count
            self.is_over |= is_over
            self.changed.notify_all()


def _stop(progress: _Progress, thread: threading.Thread) -> None:
    """Stop the thread after the batch it is committing, and wait for it."""
    with progress.changed:
        progress.stops = True
        progress.changed.notify_all()
    if thread.is_alive():
        thread.join()


def _warm(
    device: ChunkDevice, chunks: Ints, progress: _Progress, rest_seconds: float | None
) -> None:
    """Commit the chunks in order.

    :param rest_seconds: pause between chunks; None: no pause, and normal priority.
    """
    if rest_seconds is not None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PATIENT)
    step = BATCH_CHUNKS if rest_seconds is None else 1
    for start in range(0, len(chunks), step):
        batch = chunks[start : start + step]
        if progress.stops:
            break
        try:
            device.commit(batch)
        except (TryLater, ValueError):  # no more memory, or the device was closed
            progress.add(int((device.home.table[batch] == batch).sum()))
            break
        progress.add(len(batch))
        if rest_seconds is not None:
            progress.pause(rest_seconds)
    progress.add(0, is_over=True)
