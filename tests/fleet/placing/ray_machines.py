"""Machines of a Ray cluster as processes of this one, each with a loopback address of its own."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvell.fleet.placing.ray.node import RayNode
from kvell.fleet.placing.ray.node_settings import NodeSettings

PATIENCE_SECONDS = 120.0
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
PROCESSORS = 3
QUICK = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
"""For a node of Ray: it reports its autoscaler each second, and ends before its actors have."""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


@contextmanager
def two_machines(cache: Path) -> Iterator[tuple[RayNode, RayNode]]:
    """The first has Ray's own records; the second may die."""
    environ = os.environ | {"KVELL_CACHE_DIR": str(cache)} | QUICK
    environ.pop("OMP_NUM_THREADS", None)
    head = RayNode(NodeSettings(host=HEAD, processors=PROCESSORS, clients_port=0), environ)
    with head:
        joins = NodeSettings(head.address, OTHER, processors=PROCESSORS)
        with RayNode(joins, environ) as other:
            yield head, other


def family(pid: int) -> dict[int, str]:
    """A process and all below it, with their command lines."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = (entry / "stat").read_text()
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1]), words
    found = {pid: parents[pid][1]}
    while more := {one: w for one, (up, w) in parents.items() if up in found and one not in found}:
        found |= more
    return found


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one whose parent has not looked yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill_machine(node: RayNode) -> dict[int, str]:
    """Kill what makes a machine of Ray, and nothing that Kvell started; all that ran there."""
    everything = family(node.pid)
    ray = [pid for pid, words in everything.items() if pid == node.pid or "raylet" in words]
    for pid in ray:
        os.kill(pid, signal.SIGKILL)
    return everything
