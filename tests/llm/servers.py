"""``kvell serve`` as a process: what all files that ask a real server share."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Served:
    """A server's URL, the pid of its front, and the environment in which it was started."""

    url: str
    pid: int
    environment: dict[str, str] = field(repr=False)


@contextmanager
def serving(cache_dir: Path, *flags: str) -> Iterator[Served]:
    """Start a server, and end it in order.

    :param cache_dir: where the packaged model lies.
    """
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json", *flags]
    environment = os.environ | {"KVELL_CACHE_DIR": str(cache_dir), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield Served(json.loads(process.stdout.readline())["url"], process.pid, environment)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_SECONDS) == 0
