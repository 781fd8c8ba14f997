"""Fake servers as real processes."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

HERE = Path(__file__).parent


@contextlib.contextmanager
def running_server(
    *arguments: str, script: str = "fake_server.py"
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    command = [sys.executable, str(HERE / script), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.terminate()
            process.wait(timeout=20)


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """A server whose steps take a millisecond, without a key."""
    with running_server("-", "0", "--step-seconds", "0.005") as (url, _):
        yield url


@pytest.fixture
def client(server_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def scripted_url() -> Iterator[str]:
    with running_server(script="scripted_server.py") as (url, _):
        yield url


@pytest.fixture(scope="session")
def start_server() -> Callable[..., contextlib.AbstractContextManager[tuple[str, object]]]:
    """Start a server of one's own: ``with start_server(key, port, …) as (url, process)``."""
    return running_server
