"""Which node of Ray ``kvell cluster up`` started on this machine, for ``kvell cluster down``."""

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvell.errors import TryLater

FILE = "ray-node.json"
START_TIME_FIELD = 19
"""Of ``/proc/<pid>/stat``, counted from the state, which follows the program's name."""
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class NodeRecord:
    """A node of Ray that runs by itself.

    :param pid: of its first process, and ``started`` when that began, in ticks since the machine
        did: a process id alone may be somebody else's by now.
    :param address: ``host:port`` of its cluster.
    :param folder: of its files.
    """

    pid: int
    started: int
    address: str
    folder: str

    def runs(self) -> bool:
        """Whether that process is still there."""
        return started_at(self.pid) == self.started

    def save(self, directory: Path) -> None:
        """Write it down, in place of an earlier one."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE).write_bytes(msgspec.json.encode(self))

    def end(self, directory: Path, within_seconds: float) -> None:
        """End the node, with all its processes, and forget it.

        :raises TryLater: when it has not ended in time.
        """
        deadline = time.monotonic() + within_seconds
        if self.runs():
            os.kill(self.pid, signal.SIGTERM)
        while self.runs():
            if time.monotonic() >= deadline:
                raise TryLater(f"Ray's process {self.pid} has not ended in {within_seconds:g} s")
            time.sleep(LOOK_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)
        (directory / FILE).unlink(missing_ok=True)


def record_of(pid: int, address: str, folder: Path) -> NodeRecord:
    """The record of a node that runs now."""
    return NodeRecord(pid, started_at(pid), address, str(folder))


def recorded(directory: Path) -> NodeRecord | None:
    """What was written down of a node that still runs; None if there is none."""
    try:
        found = msgspec.json.decode((directory / FILE).read_bytes(), type=NodeRecord)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.runs() else None


def started_at(pid: int) -> int:
    """When a process began, in ticks since the machine did; -1 if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] != "Z":
            return int(fields[START_TIME_FIELD])
    return -1
