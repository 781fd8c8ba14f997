"""Calibrations that are kept in the cache directory, for later starts of the same instance.

::

    start ──read──► file of this key ──► used
              │ none, or damaged
              └► lock ──read again──► measure ──► NAME.partial-PID ──rename──► NAME

Instances that start together wait for the lock while the first one measures.  The system releases
the lock of a process that dies, so that the next one measures.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import BinaryIO

from kvell.clock import Clock
from kvell.cost.calibration import Calibration, decode_calibration
from kvell.errors import ChangeSomething
from kvell.wire.decoding import read_bounded

FOLDER = "prices"
KEY_CHARACTERS = 32
WAIT_SECONDS = 20.0
"""Longest wait for another process's calibration."""
LOOK_SECONDS = 0.02

Pause = Callable[[float], object]
"""Waits for some seconds."""


class KeptCalibrations:
    """The calibrations of a cache directory, by key.

    :param pause: waits between two looks at a lock that another process holds.
    """

    def __init__(self, cache_dir: Path, clock: Clock, pause: Pause | None = None) -> None:
        self._folder = cache_dir / FOLDER
        self._clock = clock
        self._pause = pause or Event().wait

    def get(self, key: str, measure: Callable[[], Calibration]) -> Calibration:
        """Return the calibration of a key; measure and keep it if there is none.

        A directory that cannot be written only loses the calibration.
        """
        path = self.path(key)
        if (kept := _read(path)) is not None:
            return kept
        with self._locked(path.with_suffix(".lock")):
            if (kept := _read(path)) is not None:
                return kept
            made = measure()
            _write(path, made)
            return made

    def path(self, key: str) -> Path:
        digest = hashlib.sha256(key.encode()).hexdigest()[:KEY_CHARACTERS]
        return self._folder / f"{digest}.json"

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Hold a lock; go on without it after WAIT_SECONDS, or if there can be none."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        except OSError:
            yield
            return
        with file:
            end_seconds = self._clock.now_seconds() + WAIT_SECONDS
            while not _take(file) and self._clock.now_seconds() < end_seconds:
                self._pause(LOOK_SECONDS)
            yield


def _take(file: BinaryIO) -> bool:
    """Return whether the lock is held now; closing the file releases it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _read(path: Path) -> Calibration | None:
    try:
        return decode_calibration(read_bounded(path), str(path))
    except (OSError, ChangeSomething):
        return None


def _write(path: Path, calibration: Calibration) -> None:
    partial = path.with_suffix(f".partial-{os.getpid()}")
    try:
        partial.write_bytes(calibration.encode())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
