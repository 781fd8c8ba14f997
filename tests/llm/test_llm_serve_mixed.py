"""``kvell serve --instances mixed=2`` with a real model, as a person would run it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.llm.servers import PATIENCE_SECONDS, serving

pytestmark = pytest.mark.long
DATA = Path(__file__).parents[1] / "data"
KEY = "secret"
BEARER = {"Authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Server:
    url: str
    environment: dict[str, str]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    def cluster(self) -> dict[str, Any]:
        told = httpx.get(f"{self.url}/cluster", headers=BEARER)
        found: dict[str, Any] = told.json()
        return found

    def kvell(self, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "kvell.cli.main", *words]
        return subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Server]:
    flags = ["--kv-memory", "128MiB", "--dtype", "float32", "--instances", "mixed=2"]
    with serving(smollm2_path.parent, *flags, "--api-key", KEY) as served:
        yield Server(served.url, served.environment)


def tokens_of(client: openai.OpenAI, prompt: list[int], max_tokens: int) -> list[int]:
    reply = client.completions.create(
        model="smollm2",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    found: list[int] = reply.choices[0].token_ids  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("count", "max_tokens"), [(8, 24), (50, 64)])
def test_prompts_over_http(server: Server, count: int, max_tokens: int) -> None:
    lines = (DATA / "smollm2_greedy.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:count]]
    client = server.client()
    with ThreadPoolExecutor(10) as pool:
        answers = pool.map(lambda row: tokens_of(client, row["prompt_token_ids"], max_tokens), rows)
        assert list(answers) == [row["token_ids"][:max_tokens] for row in rows]
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    name = "kvell:prefix_cache_queries_total"
    for instance in ("mixed-0", "mixed-1"):
        [line] = [
            one
            for one in metrics.splitlines()
            if one.startswith(name) and f'instance="{instance}"' in one
        ]
        assert float(line.split()[-1]) > 0, "both had some"
    assert httpx.get(f"{server.url}/debug/audit", headers=BEARER, timeout=60).json()["clean"]


def test_operators_scale_and_drain_it(server: Server) -> None:
    reach = ["--url", server.url, "--api-key", KEY]
    shown = server.kvell("cluster", "status", *reach)
    assert shown.returncode == 0, shown.stderr
    assert "mixed-1" in shown.stdout
    assert server.kvell("cluster", "status", "--url", server.url).returncode == 2, "no key"
    assert httpx.post(f"{server.url}/cluster/scale", json={}).status_code == 401
    up = server.kvell("cluster", "scale", "mixed=3", *reach)
    assert up.returncode == 0, up.stderr
    assert [one["id"] for one in server.cluster()["instances"]] == ["mixed-0", "mixed-1", "mixed-2"]
    down = server.kvell("cluster", "drain", "mixed-0", *reach)
    assert down.returncode == 0, down.stderr
    assert [one["id"] for one in server.cluster()["instances"]] == ["mixed-1", "mixed-2"]
    wrong = server.kvell("cluster", "drain", "mixed-9", *reach)
    assert wrong.returncode == 2
    assert "mixed-9" in wrong.stderr
    assert (
        "Paris"
        in server.client()
        .completions.create(
            model="smollm2", prompt="The capital of France is", max_tokens=4, temperature=0
        )
        .choices[0]
        .text
    )
