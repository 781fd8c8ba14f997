import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

StartServer = Callable[..., contextlib.AbstractContextManager[tuple[str, "subprocess.Popen[str]"]]]


DEADLINE_SECONDS = 20.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    [child] = [int(child) for child in children]
    return child
