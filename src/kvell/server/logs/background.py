"""A text stream that a thread writes, so that no event loop waits for the reader of a log.

A pipe without a reader is full after 64 KiB, and the next write waits for one.
"""

import io
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from typing_extensions import override

MOST_WAITING = 1 << 20
"""The most characters that wait to be written; further ones are dropped."""
FLUSH_SECONDS = 2.0
"""The time for writing the rest at the end."""


class BackgroundStream(io.TextIOBase):
    """A stream that writes to another one in a thread.

    A text that finds no room is dropped.  A line with the number of the dropped ones precedes the
    next text that finds room.

    :param describe: returns a line, with its end, about a number of lines that were dropped.
    """

    def __init__(
        self,
        stream: TextIO,
        describe: Callable[[int], str],
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._stream, self._describe, self._most_waiting = stream, describe, most_waiting
        self._descriptor = _descriptor_of(stream)
        # Reentrant, since handlers of signals run between any two steps of a thread and may log.
        self._changed = threading.Condition(threading.RLock())
        self._texts: deque[str] = deque()
        self._waiting = 0
        self._dropped_lines = 0
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="kvell-log", daemon=True)
        self._thread.start()

    @property
    @override
    def encoding(self) -> str:  # type: ignore[override] # a plain attribute of the base class
        return self._stream.encoding or "utf-8"

    @property
    @override
    def errors(self) -> str | None:  # type: ignore[override] # a plain attribute of the base class
        return self._stream.errors or "strict"

    @override
    def writable(self) -> bool:
        return True

    @override
    def isatty(self) -> bool:
        return self._stream.isatty()

    @override
    def fileno(self) -> int:
        return self._stream.fileno()

    @override
    def write(self, text: str) -> int:
        """Add a text to those that wait, or drop it; never wait.

        :raises TypeError: for bytes; that is how click finds out what a stream takes.
        """
        if not isinstance(text, str):
            raise TypeError(f"a text stream takes no {type(text).__name__}")
        with self._changed:
            if self._is_ending or self._waiting + len(text) > self._most_waiting:
                self._dropped_lines += text.count("\n")
                return len(text)
            self._note_dropped()
            self._append(text)
            return len(text)

    @override
    def flush(self) -> None:
        """Do nothing: the thread writes each text as soon as it can."""

    def end(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Write what waits, and end the thread; return False if that takes longer.

        Only the first call waits.
        """
        with self._changed:
            if self._is_ending:
                return not self._thread.is_alive()
            self._note_dropped()
            self._is_ending = True
            self._changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _note_dropped(self) -> None:
        if self._dropped_lines:
            dropped, self._dropped_lines = self._dropped_lines, 0
            self._append(self._describe(dropped))

    def _append(self, text: str) -> None:
        self._texts.append(text)
        self._waiting += len(text)
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._texts and not self._is_ending:
                    self._changed.wait()
                if not self._texts:
                    return
                text = self._texts[0]
            self._write_through(text)
            with self._changed:
                self._texts.popleft()
                self._waiting -= len(text)

    def _write_through(self, text: str) -> None:
        """Write to the file itself: a thread that waits must not hold the stream's lock.

        The interpreter takes that lock at its end.
        """
        try:
            if self._descriptor is None:
                self._stream.write(text)
                self._stream.flush()
                return
            rest = text.encode(self.encoding, "backslashreplace")
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except (OSError, ValueError):  # the reader has closed it, or there is no room on the disk
            with self._changed:
                self._dropped_lines += text.count("\n")


@contextmanager
def in_background(
    stream: TextIO, describe: Callable[[int], str] = lambda lines: f"kvell: {unwritten(lines)}\n"
) -> Iterator[BackgroundStream]:
    """Yield a stream that a thread writes to the given one while the block runs."""
    background = BackgroundStream(stream, describe)
    try:
        yield background
    finally:
        background.end()


def unwritten(lines: int) -> str:
    return f"{lines} lines of the log were not written: its reader was too slow"


def _descriptor_of(stream: TextIO) -> int | None:
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError):
        return None
