"""``kvell serve --cluster`` on two machines of Ray with a real model: exact, also when one dies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fleet.placing.ray_machines import (
    HEAD,
    OTHER,
    PATIENCE_SECONDS,
    family,
    is_gone,
    kill_machine,
    two_machines,
    until,
)

pytest.importorskip("ray")

DATA = Path(__file__).parents[2] / "data"
ROWS = [json.loads(row) for row in (DATA / "smollm2_greedy.jsonl").read_text().splitlines()][:12]
NAMES = ("prefill-0", "decode-0", "decode-1")


@dataclass(frozen=True)
class Cluster:
    url: str
    server: "subprocess.Popen[str]"
    stderr: Path
    head: Any
    other: Any
    environ: dict[str, str]

    @contextmanager
    def another_front(self) -> Iterator["Cluster"]:
        """A second server of the same cluster; it is killed at the end."""
        assert isinstance(self.server.args, list)
        with subprocess.Popen(
            self.server.args,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self.environ,
        ) as server:
            try:
                assert server.stdout is not None
                url = json.loads(server.stdout.readline())["url"]
                yield replace(self, url=url, server=server)
            finally:
                server.kill()

    def managers(self) -> list[int]:
        everything = family(self.head.pid) | family(self.other.pid)
        return [pid for pid, words in everything.items() if "ray::ManagerActor" in words]

    def incarnations(self) -> dict[str, int]:
        return {name: one["incarnation"] for name, one in self.instances().items()}

    def instances(self) -> dict[str, dict[str, Any]]:
        told = httpx.get(f"{self.url}/cluster", timeout=60).json()["instances"]
        return {one["id"]: one for one in told}

    def steps(self, instance: str) -> int:
        page = httpx.get(f"{self.url}/metrics", timeout=60).text
        rows = [row for row in page.splitlines() if row.startswith("kvell:steps_total{")]
        return sum(int(float(row.split()[-1])) for row in rows if f'"{instance}"' in row)

    def tokens_of(self, row: dict[str, Any], max_tokens: int = 64) -> list[int]:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        reply = client.completions.create(
            model="smollm2",
            prompt=row["prompt_token_ids"],
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        found: list[int] = reply.choices[0].token_ids  # type: ignore[attr-defined]
        return found

    def all_serve(self) -> bool:
        told = self.instances()
        return set(told) == set(NAMES) and {one["state"] for one in told.values()} == {"serving"}


@pytest.fixture(scope="module")
def cluster(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cache = smollm2_path.parent
    stderr = tmp_path_factory.mktemp("ray") / "stderr"
    environ = os.environ | {"KVELL_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    with two_machines(cache) as (head, other), stderr.open("w") as told:
        command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json"]
        command += ["--kv-memory", "64MiB", "--dtype", "float32"]
        command += ["--instances", "prefill=1,decode=2", "--cluster", head.address]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=told, text=True, env=environ
        ) as server:
            try:
                assert server.stdout is not None
                first = server.stdout.readline()
                assert first, stderr.read_text()
                yield Cluster(json.loads(first)["url"], server, stderr, head, other, environ)
            finally:
                server.send_signal(signal.SIGTERM)
                code = server.wait(PATIENCE_SECONDS)
            assert code == 0
            # Others were fronts too, so the cluster waits a minute for their successors.  Then
            # everything is given back: nothing of Kvell runs on any machine.
            until(lambda: not _left(head))


def _left(head: Any) -> list[str]:
    words = family(head.pid).values()
    return [one for one in words if "kvell.cli.main" in one or "LauncherActor" in one]


@pytest.mark.parametrize(
    ("count", "max_tokens"), [(4, 16), pytest.param(len(ROWS), 64, marks=pytest.mark.long)]
)
def test_instances_are_spread_and_answer_exactly(
    cluster: Cluster, count: int, max_tokens: int
) -> None:
    told = cluster.instances()
    assert {one["host"] for one in told.values()} == {HEAD, OTHER}
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda row: cluster.tokens_of(row, max_tokens), ROWS[:count]))
    assert answers == [row["token_ids"][:max_tokens] for row in ROWS[:count]]
    assert cluster.steps("decode-0") and cluster.steps("decode-1")


def test_rays_noise_does_not_reach_the_terminal(cluster: Cluster) -> None:
    """Lines are progress, the contract, and the log's."""
    told = cluster.stderr.read_text()
    assert "connected to instance decode-1" in told
    assert "ray" not in told.lower().replace(str(cluster.url), "")


def test_the_secret_is_on_no_command_line(cluster: Cluster) -> None:
    words = family(cluster.head.pid) | family(cluster.other.pid)
    instances = [line for line in words.values() if "kvell.cli.main instance" in line]
    assert len(instances) == 3
    assert not [line for line in instances if "secret" in line]


@pytest.mark.long
def test_an_instance_is_added_and_taken_out(cluster: Cluster) -> None:
    """It gets a place of its own, and leaves nothing behind."""

    def asked(count: int) -> None:
        body = {"instances": {"decode": count}}
        assert httpx.post(f"{cluster.url}/cluster/scale", json=body, timeout=60).status_code == 202

    asked(3)
    until(lambda: cluster.instances().get("decode-2", {}).get("state") == "serving")
    one = cluster.instances()["decode-2"]
    assert not is_gone(one["pid"])
    asked(2)
    until(lambda: "decode-2" not in cluster.instances())
    until(lambda: is_gone(one["pid"]))
    assert cluster.all_serve()


@pytest.mark.long
def test_a_second_front_shares_the_instances_and_may_die(cluster: Cluster) -> None:
    """Both stream at once; then one is killed, and the other's answers are whole."""
    before = cluster.incarnations()
    with cluster.another_front() as second, ThreadPoolExecutor(6) as pool:
        assert second.incarnations() == before
        answers = list(pool.map(second.tokens_of, ROWS[:6]))
        assert answers == [row["token_ids"] for row in ROWS[:6]]
        lost = [pool.submit(second.tokens_of, row) for row in ROWS]
        kept = [pool.submit(cluster.tokens_of, row) for row in ROWS]
        until(lambda: any(one.done() for one in lost))
        second.server.kill()
        assert [one.result(PATIENCE_SECONDS) for one in kept] == [row["token_ids"] for row in ROWS]
        failed = [one for one in lost if one.exception(PATIENCE_SECONDS) is not None]
        assert failed, "it was killed too late"
    assert cluster.incarnations() == before


@pytest.mark.long
def test_the_manager_may_die(cluster: Cluster) -> None:
    """Requests go on without it; another finds the instances as they are, and takes orders."""
    before = cluster.incarnations()
    [pid] = cluster.managers()
    os.kill(pid, signal.SIGKILL)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(cluster.tokens_of, ROWS))
    assert answers == [row["token_ids"] for row in ROWS]
    until(lambda: bool(cluster.managers()) and cluster.managers() != [pid])
    body = {"instances": {"decode": 2}}

    def takes_orders() -> bool:
        asked = httpx.post(f"{cluster.url}/cluster/scale", json=body, timeout=60)
        return asked.status_code == 202

    until(takes_orders)
    assert cluster.incarnations() == before


@pytest.mark.long
def test_a_machine_dies(cluster: Cluster) -> None:
    """All of it is gone; what was in flight ends exactly, and its instances come back elsewhere."""
    before = cluster.instances()
    there = [name for name, one in before.items() if one["host"] == OTHER]
    stepped = {name: cluster.steps(name) for name in NAMES}
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(cluster.tokens_of, row) for row in ROWS]
        until(lambda: any(cluster.steps(name) > stepped[name] for name in there))
        ran = kill_machine(cluster.other)
        assert [words for words in ran.values() if "kvell.cli.main instance" in words]
        until(lambda: all(is_gone(pid) for pid in ran))
        told = [answer.result(PATIENCE_SECONDS) for answer in answers]
    assert told == [row["token_ids"] for row in ROWS]
    until(cluster.all_serve)
    after = cluster.instances()
    assert {one["host"] for one in after.values()} == {HEAD}
    for name in NAMES:
        is_new = after[name]["incarnation"] != before[name]["incarnation"]
        assert is_new == (name in there)
    assert cluster.tokens_of(ROWS[0]) == ROWS[0]["token_ids"]
