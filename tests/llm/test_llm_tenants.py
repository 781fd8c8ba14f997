"""``kvell serve`` with a real model and a file of keys: tenants share no cached prefix, and take
turns in the instance."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

PATIENCE_SECONDS = 120.0
SEATS = 4
KEYS = """
[[keys]]
name = "red"
key = "red-key"

[[keys]]
name = "blue"
key = "blue-key"
"""
PROMPT = "Pages of memory are handed out one by one. " * 12


@pytest.fixture(scope="module")
def url(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    key_file = tmp_path_factory.mktemp("tenants") / "keys.toml"
    key_file.write_text(KEYS)
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json"]
    command += ["--kv-memory", "128MiB", "--dtype", "float32", "--api-key-file", str(key_file)]
    command += ["--max-num-seqs", str(SEATS)]
    environment = os.environ | {"KVELL_CACHE_DIR": str(smollm2_path.parent), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0


def cached_tokens(url: str, key: str, salt: str = "") -> int:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        reply = client.completions.create(
            model="smollm2",
            prompt=PROMPT,
            max_tokens=1,
            temperature=0,
            extra_body={"cache_salt": salt},
        )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0


def test_a_tenant_hits_its_own_prefixes_and_no_others(url: str) -> None:
    assert cached_tokens(url, "red-key") == 0
    assert cached_tokens(url, "red-key") > 0
    for salt in ("", "3:red", "red"):
        assert cached_tokens(url, "blue-key", salt) == 0
    assert cached_tokens(url, "blue-key") > 0
    assert cached_tokens(url, "red-key") > 0


def num_ended(url: str) -> int:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    named = [line for line in lines if line.startswith("kvell:request_success_total")]
    return int(sum(float(line.split()[-1]) for line in named))


def test_a_tenant_waits_for_no_backlog_that_the_instance_has(url: str) -> None:
    """The instance has all of it at once, since it is within the front's credits."""
    many = {"model": "smollm2", "prompt": [f"{n} is" for n in range(32)], "n": 8}
    many |= {"stream": True, "ignore_eos": True}
    path, red = f"{url}/v1/completions", {"Authorization": "Bearer red-key"}
    with httpx.stream("POST", path, json=many | {"max_tokens": 16}, headers=red) as reply:
        assert reply.status_code == 200, reply.read()
        lines = reply.iter_lines()  # kept: without it the connection would be closed
        next(lines)
        before = num_ended(url)
        assert before < 100, "the backlog was worked off before"
        cached_tokens(url, "blue-key")
        assert num_ended(url) - before - 1 <= 64, "a quarter of the others went first"
