"""Processes of systems: started, paused while another is measured, ended.

::

    starting ──answers──► idle ──continue──► measured ──pause──► idle ──end──► gone
        └─ ends by itself, or too slow ─► SystemFailed with its last words
"""

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.error import URLError

from kvell.errors import KvellError

LAST_LINES = 15
POLL_SECONDS = 0.25


class SystemFailed(KvellError):  # noqa: N818 - it says what happened
    """A system did not start, or ended; the message has its last lines of output."""


class SystemProcess:
    """A process and its children; their output goes to a file.

    :param log: its stderr, and stdout unless that is a pipe.
    :param directory: it is started there; None: where this process is.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        talks: bool = False,
        directory: Path | None = None,
    ) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else stderr,
                stderr=stderr,
                env={**os.environ, **environment},
                cwd=directory,
                start_new_session=True,
                text=True,
            )

    def say(self, line: str) -> None:
        """Write a line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """The next line of its stdout.

        :raises SystemFailed: if it ends instead.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.failed("ended")
        return line

    def wait_for(self, url: str, within_seconds: float) -> None:
        """Wait until ``url`` answers with 200.

        :raises SystemFailed: if it ends, or takes longer.
        """
        deadline = time.monotonic() + within_seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.failed(f"ended with status {self.process.returncode}")
            with contextlib.suppress(URLError, OSError), urllib.request.urlopen(url, timeout=5):
                return
            time.sleep(POLL_SECONDS)
        raise self.failed(f"does not answer within {within_seconds:g} s")

    def failed(self, problem: str) -> SystemFailed:
        """An error with the problem and its last lines of output."""
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return SystemFailed("\n".join([problem, *lines]))

    def pause(self) -> None:
        """Stop it and its children (SIGSTOP), so that they take no CPU, not even by spinning."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it and its children."""
        self._signal(signal.SIGCONT)

    def end(self, within_seconds: float = 30.0) -> None:
        """End it and its children; those that do not end are killed."""
        family = {pid: birth(pid) for pid in descendants(self.process.pid)}
        self.resume()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within_seconds)
        self.process.kill()
        self.process.wait()
        for pid, born in family.items():
            if born is not None and birth(pid) == born:  # the number may be another's by now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def descendants(pid: int) -> Iterator[int]:
    """Children of a process, and theirs."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield int(child)
                yield from descendants(int(child))


def birth(pid: int) -> str | None:
    """When a process was started, in the kernel's ticks; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
