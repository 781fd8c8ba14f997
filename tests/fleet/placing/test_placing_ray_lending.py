"""A prompt of four pools on two machines of Ray: its sections lie on both, its answer is exact.

The cluster's manager may die or stand still meanwhile.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvell.vocabulary import MIB
from tests.async_engine.lent_texts import alone, text_of
from tests.fleet.placing.ray_machines import (
    HEAD,
    OTHER,
    PATIENCE_SECONDS,
    family,
    is_gone,
    two_machines,
    until,
)

pytest.importorskip("ray")

TOKENS, LONG_ANSWER = 4000, 24
"""176 MiB in float32: 3.7 pools."""
SHORT, SHORT_ANSWER = 50, 40
ANSWER_SECONDS = 1500
POLL_SECONDS = 0.2


def body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    asked = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return {**asked, "ignore_eos": True, "return_token_ids": True, "logprobs": 2}


def said(url: str, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
    reply = httpx.post(
        f"{url}/v1/completions", json=body(prompt, max_tokens), timeout=ANSWER_SECONDS
    )
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@dataclass(frozen=True)
class Lenders:
    """A cluster of six instances on two machines.

    :param hosts: of the instances, by name.
    """

    url: str
    hosts: dict[str, str]
    pids: tuple[int, int]

    def sections(self, name: str) -> dict[str, int]:
        """Sections of each instance, ``lent`` or ``borrowed``."""
        told = httpx.get(f"{self.url}/cluster", timeout=60).json()["instances"]
        return {one["id"]: one["sections"][name] for one in told}

    def incarnations(self) -> dict[str, int]:
        told = httpx.get(f"{self.url}/cluster", timeout=60).json()["instances"]
        return {one["id"]: one["incarnation"] for one in told}

    def managers(self) -> list[int]:
        everything = family(self.pids[0]) | family(self.pids[1])
        return [pid for pid, words in everything.items() if "ray::ManagerActor" in words]


@pytest.fixture(scope="module")
def lenders(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lenders]:
    cache = smollm2_path.parent
    environ = os.environ | {"KVELL_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json"]
    command += ["--kv-memory", "48MiB", "--dtype", "float32", "--instances", "mixed=6"]
    stderr = tmp_path_factory.mktemp("ray") / "stderr"
    with (
        two_machines(cache) as (head, other),
        stderr.open("w") as told,
        subprocess.Popen(
            [*command, "--cluster", head.address],
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
            env=environ,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            first = server.stdout.readline()
            assert first, stderr.read_text()
            url = json.loads(first)["url"]
            instances = httpx.get(f"{url}/cluster", timeout=60).json()["instances"]
            hosts = {one["id"]: one["host"] for one in instances}
            assert set(hosts.values()) == {HEAD, OTHER} and len(hosts) == 6
            yield Lenders(url, hosts, (head.pid, other.pid))
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_SECONDS) == 0


def check(path: Path, lenders: Lenders, start: int, fault: Callable[[], None]) -> set[str]:
    """A long prompt beside two short ones is answered exactly.

    :param start: where its text begins.
    :param fault: happens while sections of it are lent.
    :returns: who lent.
    """
    prompts = [(text_of(TOKENS, start), LONG_ANSWER)]
    prompts += [(text_of(SHORT, 41 * index + 7), SHORT_ANSWER) for index in range(2)]
    expected = [
        (tokens, [one.logprob for one in told])
        for tokens, told in alone(path, prompts, kv_bytes=512 * MIB)
    ]
    with ThreadPoolExecutor(3) as pool:
        long, *short = [pool.submit(said, lenders.url, *one) for one in prompts]
        lent: set[str] = set()
        while not long.done():
            now = {name for name, count in lenders.sections("lent").items() if count}
            if now and not lent:
                fault()
            lent |= now
            wait([long], POLL_SECONDS)
        assert [long.result(), *(one.result() for one in short)] == expected
    until(lambda: not any(lenders.sections("lent").values()))
    return lent


@pytest.mark.long
@pytest.mark.timeout(ANSWER_SECONDS + 300)
def test_a_prompt_of_four_pools_on_two_machines(smollm2_path: Path, lenders: Lenders) -> None:
    lent = check(smollm2_path, lenders, 0, lambda: None)
    assert {lenders.hosts[name] for name in lent} == {HEAD, OTHER}, "both machines lent"


@pytest.mark.long
@pytest.mark.timeout(ANSWER_SECONDS + 300)
@pytest.mark.parametrize("paused_seconds", [0.0, 4.0])
def test_the_manager_may_die_or_stand_still_while_memory_is_lent(
    smollm2_path: Path, lenders: Lenders, paused_seconds: float
) -> None:
    before, [pid] = lenders.incarnations(), lenders.managers()

    def fault() -> None:
        os.kill(pid, signal.SIGSTOP if paused_seconds else signal.SIGKILL)
        if paused_seconds:
            threading.Timer(paused_seconds, os.kill, (pid, signal.SIGCONT)).start()

    lent = check(smollm2_path, lenders, 400, fault)
    assert lent, "it came while nothing was lent"
    assert is_gone(pid) != bool(paused_seconds)
    until(lambda: len(lenders.managers()) == 1)
    assert lenders.incarnations() == before
