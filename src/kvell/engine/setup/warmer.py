"""Puts memory behind a pool's chunks while the first requests are served already.

The first touch of a chunk costs milliseconds, once: a large pool would keep the first request
waiting for seconds.  A thread does it, from the first chunk to the last; whoever plans asks
between steps how many have come, and is told through the journal.
"""

import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np

from kvell.device.chunks import ChunkDevice, Ints
from kvell.errors import TryLater

PATIENT = 19
"""The kindest priority: what is left of a core."""
BATCH_CHUNKS = 4
"""Committed before anyone is told; some 20 ms."""
REST_SECONDS = 0.5
"""From one chunk to the next of a patient one, while somebody computes.  The kindest thread still
takes its core for milliseconds from those who wait for each other several times in one: at a
twentieth of the time it made steps twice as long."""


class Warmer:
    """A thread that commits chunks in order; ends with them, or when nobody holds it any more.

    :param chunks: that have no memory yet, in the order in which the pool wants them.
    """

    def __init__(
        self,
        device: ChunkDevice,
        chunks: Sequence[int],
        *,
        is_patient: bool = False,
        rest_seconds: float = REST_SECONDS,
    ) -> None:
        """:param is_patient: nobody waits for it, so it leaves the cores to whoever computes.
        :param rest_seconds: from a chunk to the next, while somebody does.
        """
        self._progress = _Progress()
        self._told = 0
        rest = rest_seconds if is_patient else None
        arguments = (device, np.asarray(chunks, np.int32), self._progress, rest)
        self._thread = threading.Thread(target=_warm, args=arguments, daemon=True)
        # Also at exit: a thread that comes back from the system while Python ends would abort it.
        weakref.finalize(self, _stop, self._progress, self._thread)
        self._thread.start()

    def take(self) -> int:
        """Chunks that have memory since the last call."""
        done = self._progress.done
        new, self._told = done - self._told, done
        return new

    @property
    def is_done(self) -> bool:
        """Will there be no more than :meth:`take` gives now?"""
        return self._progress.is_over

    def computes(self, is_computing: bool) -> None:
        """Does somebody compute now? A patient one then hardly does anything."""
        progress = self._progress
        if progress.is_disturbing != is_computing:
            with progress.changed:
                progress.is_disturbing = is_computing
                progress.changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until there are more, or none will come, or so long."""
        with self._progress.changed:
            self._progress.changed.wait_for(
                lambda: self._progress.done > self._told or self._progress.is_over, seconds
            )

    def finish(self) -> None:
        """Wait until no more will come."""
        with self._progress.changed:
            self._progress.changed.wait_for(lambda: self._progress.is_over)


class _Progress:
    """What the thread and its owner both see."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.done = 0
        self.is_over = False
        self.stops = False
        self.is_disturbing = False

    def rest(self, seconds: float) -> None:
        """So long, or until nobody is disturbed."""
        with self.changed:
            self.changed.wait_for(lambda: self.stops or not self.is_disturbing, seconds)

    def add(self, count: int, *, is_over: bool = False) -> None:
        with self.changed:
            self.done += count
            self.is_over |= is_over
            self.changed.notify_all()


def _stop(progress: _Progress, thread: threading.Thread) -> None:
    """After the batch that is being committed."""
    with progress.changed:
        progress.stops = True
        progress.changed.notify_all()
    if thread.is_alive():
        thread.join()


def _warm(
    device: ChunkDevice, chunks: Ints, progress: _Progress, rest_seconds: float | None
) -> None:
    """:param rest_seconds: None if it never rests."""
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
            progress.rest(rest_seconds)
    progress.add(0, is_over=True)
