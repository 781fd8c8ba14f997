"""Memory of processes, measured from outside."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from bench.side_by_side.processes import descendants
from kvell.clock import Clock
from kvell.device.available import process_bytes
from kvell.errors import KvellError

_PROBE = """
from kvell.cli.terminal.environment import prepare_process
prepare_process()
import {modules}
from kvell.device.available import process_bytes
print(process_bytes())
"""


def import_bytes(modules: Sequence[str]) -> int:
    """Anonymous and shared memory of a process that has only imported these modules.

    :raises KvellError: if they cannot be imported.
    """
    code = _PROBE.format(modules=", ".join(modules))
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise KvellError(f"cannot import {', '.join(modules)}: {ended.stderr[-500:]}")
    return int(ended.stdout)


def tree_bytes(pid: int) -> int:
    """Anonymous and shared memory of a process tree, each page counted once."""
    return sum(process_bytes(one) for one in (pid, *descendants(pid)))


@dataclass(frozen=True)
class Sample:
    """The size of a process tree, in bytes, and when: seconds since the first sample."""

    seconds: float
    size_bytes: int


class Sampler:
    """Samples a process tree at equal intervals, in a thread, until stopped."""

    def __init__(self, pid: int, clock: Clock, every_seconds: float = 1.0) -> None:
        self.samples: list[Sample] = []
        self._pid, self._clock, self._every_seconds = pid, clock, every_seconds
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> list[Sample]:
        """Stop; return all samples."""
        self._stops.set()
        self._thread.join()
        return self.samples

    def _run(self) -> None:
        began_seconds = self._clock.now_seconds()
        while True:
            now_seconds = self._clock.now_seconds() - began_seconds
            self.samples.append(Sample(now_seconds, tree_bytes(self._pid)))
            behind_seconds = self._clock.now_seconds() - began_seconds - now_seconds
            if self._stops.wait(max(0.0, self._every_seconds - behind_seconds)):
                return
