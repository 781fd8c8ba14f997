"""The record of the node that ``kvell cluster up`` started, for ``kvell cluster down``."""

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvell.errors import TryLater
from kvell.wire.decoding import MalformedError, decode

FILE = "ray-node.json"
START_TIME_FIELD = 19
"""Field of ``/proc/<pid>/stat``, counted from the state, which follows the program's name."""
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class NodeRecord:
    """The record of a node of Ray that no command waits for.

    :param pid: process id of the node's first process.
    :param started: time when that process began, in ticks since the machine started: by now the
        process id alone may be another process's.
    """

    pid: int
    started: int
    address: str
    folder: str

    def runs(self) -> bool:
        return started_at(self.pid) == self.started

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE).write_bytes(msgspec.json.encode(self))

    def end(self, directory: Path, within_seconds: float) -> None:
        """End the node with all its processes, and delete the record.

        :raises TryLater: when the node has not ended in time.
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


_RECORD = msgspec.json.Decoder(NodeRecord)


def record_of(pid: int, address: str, folder: Path) -> NodeRecord:
    return NodeRecord(pid, started_at(pid), address, str(folder))


def read_record(directory: Path) -> NodeRecord | None:
    """Return the record of a node that still runs; None without one."""
    try:
        record = decode(_RECORD, (directory / FILE).read_bytes())
    except (OSError, MalformedError):
        return None
    return record if record.runs() else None


def started_at(pid: int) -> int:
    """Return when a process began, in ticks since the machine started; -1 if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] != "Z":
            return int(fields[START_TIME_FIELD])
    return -1
