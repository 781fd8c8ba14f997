"""Servers over real engine cores, as processes."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

StartMap = Callable[..., contextlib.AbstractContextManager[str]]


@pytest.fixture(scope="session")
def start_map() -> StartMap:
    """Start a server of one's own: ``with start_map(key, instances, …) as url``."""

    @contextlib.contextmanager
    def started(key: str = "-", instances: int = 1, *arguments: str) -> Iterator[str]:
        script = str(Path(__file__).with_name("map_server.py"))
        command = [sys.executable, script, key, str(instances), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield process.stdout.readline().strip()
            finally:
                process.terminate()
                process.wait(timeout=30)

    return started


@pytest.fixture(scope="module")
def map_url(start_map: StartMap) -> Iterator[str]:
    """A server over two instances with 400 large pages each."""
    with start_map("-", 2, "--large-pages", "400", "--step-seconds", "0.005") as url:
        yield url
