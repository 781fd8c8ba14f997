"""``kvell serve`` is stopped or killed while its instances lend each other memory."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.async_engine.faults import Job
from tests.async_engine.handover_faults import state_of
from tests.async_engine.lending_jobs import KV_BYTES, long_jobs, wide_model
from tests.front.scenarios import is_gone
from tests.llm.servers import PATIENCE_SECONDS
from tests.llm.test_llm_serve_disaggregated import until

pytestmark = pytest.mark.long
"""`tests/async_engine` lends with real models, and `tests/fleet/faults` kills real processes."""
MOST_STOPPED_SECONDS = 4.0
"""Longer than the two seconds in which a recalled section is to be given back."""


@dataclass(frozen=True)
class Server:
    """It decides who lends, in the process that answers."""

    url: str
    model: str
    process: "subprocess.Popen[str]"

    def instances(self) -> list[dict[str, Any]]:
        told = httpx.get(f"{self.url}/cluster", timeout=PATIENCE_SECONDS).json()["instances"]
        return list(told)

    def lent(self) -> int:
        return sum(one["sections"]["lent"] for one in self.instances() if one.get("sections"))

    def ask(self, job: Job) -> list[int] | None:
        """Return the answer; None if nobody had memory to lend just now."""
        body = {
            "model": self.model,
            "prompt": job.prompt,
            "max_tokens": job.sampling.max_tokens,
            "temperature": job.sampling.temperature,
            "seed": job.sampling.seed,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS)
        if reply.status_code == httpx.codes.TOO_MANY_REQUESTS:
            return None
        assert reply.status_code == httpx.codes.OK, reply.text
        found: list[int] = reply.json()["choices"][0]["token_ids"]
        return found

    def pause(self, seconds: float) -> None:
        """Stop the process so long, while memory is lent; it is not killed meanwhile."""
        until(lambda: self.lent() > 0)
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(self.process.pid) == "T")
        time.sleep(seconds)
        assert state_of(self.process.pid) == "T"
        self.process.send_signal(signal.SIGCONT)
        until(lambda: state_of(self.process.pid) != "T")


@pytest.fixture(scope="module")
def directory(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_model(smollm2_path, tmp_path_factory.mktemp("lent") / "wide")


@pytest.fixture(scope="module")
def jobs(directory: Path) -> list[Job]:
    return long_jobs(directory)


@contextmanager
def served(directory: Path) -> Iterator[Server]:
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json"]
    command += ["--model", str(directory), "--kv-memory", str(KV_BYTES), "--dtype", "float32"]
    command += ["--instances", "mixed=4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield Server(json.loads(process.stdout.readline())["url"], str(directory), process)
        finally:
            process.kill()


class Asking:
    """Threads that ask one job after another, until the end."""

    def __init__(self, server: Server, jobs: list[Job], streams: int) -> None:
        self._server, self._jobs = server, jobs
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(streams)]
        self.answered = 0
        self.problems: list[str] = []

    def __enter__(self) -> "Asking":
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        for one in self._threads:
            one.join()

    def _ask(self, number: int) -> None:
        for turn in range(10**6):
            if self._is_over.is_set():
                return
            job = self._jobs[(turn + number) % len(self._jobs)]
            try:
                tokens = self._server.ask(job)
            except (httpx.HTTPError, AssertionError) as error:
                self.problems.append(str(error))
                continue
            self.answered += tokens is not None
            if tokens not in (None, job.tokens):
                self.problems.append(f"a wrong answer to {len(job.prompt)} tokens")


MANY = (pytest.mark.timeout(3600),)


@pytest.mark.parametrize("pauses", [2, pytest.param(30, marks=MANY)])
def test_who_decides_sleeps_while_memory_is_lent(
    directory: Path, jobs: list[Job], pauses: int
) -> None:
    chance = random.Random(pauses)
    with served(directory) as server:
        with Asking(server, jobs, 4) as asking:
            for _ in range(pauses):
                before = asking.answered
                server.pause(chance.uniform(0, MOST_STOPPED_SECONDS))
                until(lambda before=before: asking.answered > before)  # type: ignore[misc]
        assert asking.problems == []
        until(lambda: server.lent() == 0)
        assert httpx.get(f"{server.url}/debug/audit", timeout=60).json()["clean"]


@pytest.mark.parametrize("deaths", [1, pytest.param(10, marks=MANY)])
def test_who_decides_dies_while_memory_is_lent(
    directory: Path, jobs: list[Job], deaths: int
) -> None:
    """Its instances end with it, and leave nothing."""
    for _ in range(deaths):
        with served(directory) as server, Asking(server, jobs, 4) as asking:
            until(lambda: server.lent() > 0)
            pids = [one["pid"] for one in server.instances()]
            server.process.kill()
            assert server.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
            until(lambda: all(map(is_gone, pids)))  # noqa: B023
            asking._is_over.set()
