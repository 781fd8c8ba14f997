"""``kvell serve`` is stopped or killed while its instances lend each other memory: alone, or with
every other mechanism."""

import itertools
import json
import logging
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

from kvell.engine.setup.engine_settings import EngineSettings
from tests.async_engine.fault_cases import SHAPES
from tests.async_engine.handover_faults import state_of
from tests.async_engine.jobs import Job
from tests.async_engine.lending_jobs import KV_BYTES, everything, long_jobs, mixed_jobs, wide_model
from tests.fleet.placing.ray_machines import family, is_gone
from tests.llm.disaggregated import until
from tests.llm.servers import PATIENCE_SECONDS

pytestmark = pytest.mark.long
logger = logging.getLogger(__name__)
"""`tests/async_engine` lends with real models, and `tests/fleet/faults` kills real processes."""
ALONE = "mixed=4"
SHARED_MEMORY = Path("/dev/shm")
MOST_DELAY_SECONDS = 2.0
MOST_STOPPED_SECONDS = 4.0
"""Longer than the two seconds in which a recalled section is to be given back."""


class NobodyLendsError(Exception):
    """A request was not let in."""


@dataclass(frozen=True)
class Setup:
    """How a server is started, and what it is asked."""

    model: str
    flags: list[str]
    jobs: list[Job]


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

    def ask(self, job: Job) -> Iterator[int]:
        """Yield the tokens of an answer.

        :raises NobodyLendsError: if nobody had memory to lend just now.
        """
        body = {
            "model": self.model,
            "prompt": job.prompt,
            "max_tokens": job.sampling.max_tokens,
            "temperature": job.sampling.temperature,
            "seed": job.sampling.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        url = f"{self.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_SECONDS) as reply:
            if reply.status_code == httpx.codes.TOO_MANY_REQUESTS:
                raise NobodyLendsError
            assert reply.status_code == httpx.codes.OK, reply.read()
            events = (line[6:] for line in reply.iter_lines() if line.startswith("data: "))
            for event in itertools.takewhile(lambda event: event != "[DONE]", events):
                told = json.loads(event)
                if told.get("error", {}).get("type") == "rate_limit_error":
                    raise NobodyLendsError
                assert "error" not in told, event
                yield from told["choices"][0]["token_ids"]

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
def setup(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Setup:
    """By its instances; those of ``ALONE`` only lend."""
    directory = tmp_path_factory.mktemp("lent")
    if request.param == ALONE:
        model = wide_model(smollm2_path, directory / "wide")
        settings = EngineSettings(str(model), dtype="float32", kv_memory_bytes=KV_BYTES)
        jobs = long_jobs(model)
    else:
        settings = EngineSettings(**everything(smollm2_path, directory))
        jobs = mixed_jobs(Path(settings.model))
    return Setup(settings.model, [*settings.flags(), "--instances", request.param], jobs)


@contextmanager
def served(setup: Setup, **environ: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environ
    with subprocess.Popen(
        [*command, *setup.flags], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield Server(json.loads(process.stdout.readline())["url"], setup.model, process)
        finally:
            process.kill()


class Asking:
    """Threads that ask one job after another, until the end."""

    def __init__(self, server: Server, jobs: list[Job], streams: int) -> None:
        self._server, self._jobs = server, jobs
        self.is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(streams)]
        self.answered = self.turned_away = 0
        self.problems: list[str] = []
        self.wrong: list[str] = []

    def __enter__(self) -> "Asking":
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.is_over.set()
        for one in self._threads:
            one.join()

    def _ask(self, number: int) -> None:
        for turn in range(10**6):
            if self.is_over.is_set():
                return
            job = self._jobs[(turn + number) % len(self._jobs)]
            tokens = 0
            try:
                for tokens, token in enumerate(self._server.ask(job), 1):
                    if job.tokens[tokens - 1 : tokens] != [token]:
                        self.wrong.append(f"token {tokens} to {len(job.prompt)} tokens: {token}")
            except NobodyLendsError:
                self.turned_away += 1
            except (httpx.HTTPError, AssertionError) as error:
                self.problems.append(str(error))
            else:
                self.answered += 1
                if tokens != len(job.tokens):
                    self.wrong.append(f"{tokens} tokens, not {len(job.tokens)}")


def cases(few: int, many: int, of_each: int) -> list[Any]:
    marks = pytest.mark.timeout(3600)
    counts = [(ALONE, few), (ALONE, many), *((shape, of_each) for shape in SHAPES)]
    return [pytest.param(*case, marks=marks) for case in counts]


@pytest.mark.parametrize(("setup", "pauses"), cases(2, 30, 10), indirect=["setup"])
def test_who_decides_sleeps_while_memory_is_lent(setup: Setup, pauses: int) -> None:
    chance = random.Random(pauses)
    with served(setup) as server:
        with Asking(server, setup.jobs, 4) as asking:
            for _ in range(pauses):
                before = asking.answered
                server.pause(chance.uniform(0, MOST_STOPPED_SECONDS))
                until(lambda before=before: asking.answered > before)  # type: ignore[misc]
        logger.info("%d answered, %d turned away", asking.answered, asking.turned_away)
        assert asking.wrong == asking.problems == []
        until(lambda: server.lent() == 0)
        assert httpx.get(f"{server.url}/debug/audit", timeout=60).json()["clean"]


@pytest.mark.parametrize(("setup", "deaths"), cases(1, 10, 10), indirect=["setup"])
def test_who_decides_dies_while_memory_is_lent(setup: Setup, deaths: int, tmp_path: Path) -> None:
    """Its instances end with it, and leave nothing."""
    shared = set(SHARED_MEMORY.iterdir())
    chance = random.Random(deaths)
    for _ in range(deaths):
        with served(setup, TMPDIR=str(tmp_path)) as server, Asking(server, setup.jobs, 4) as asking:
            until(lambda: server.lent() > 0)
            time.sleep(chance.uniform(0, MOST_DELAY_SECONDS))
            pids = family(server.process.pid)
            assert len(pids) > len(server.instances()) > 0
            server.process.kill()
            assert server.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
            until(lambda: all(map(is_gone, pids)))  # noqa: B023
            asking.is_over.set()
        logger.info("%d answered, %d turned away", asking.answered, asking.turned_away)
        assert asking.wrong == []
    assert list(tmp_path.iterdir()) == []
    assert set(SHARED_MEMORY.iterdir()) <= shared
