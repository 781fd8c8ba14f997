import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

StartServer = Callable[..., contextlib.AbstractContextManager[tuple[str, "subprocess.Popen[str]"]]]

DEADLINE_SECONDS = 20.0


def child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    [child] = [int(child) for child in children]
    return child
