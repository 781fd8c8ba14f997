"""A prompt of four pools on two machines of Ray: its sections lie on both, its answer is exact."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvell import LLM
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.vocabulary import MIB
from tests.async_engine.test_async_engine_reach import text_of
from tests.fleet.placing.ray_machines import HEAD, OTHER, PATIENCE_SECONDS, two_machines, until

pytest.importorskip("ray")

TOKENS, LONG_ANSWER = 4000, 24
"""176 MiB in float32: 3.7 pools."""
SHORT, SHORT_ANSWER = 50, 40
ANSWER_SECONDS = 600


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


def alone(path: Path, prompts: list[tuple[list[int], int]]) -> list[tuple[list[int], list[float]]]:
    """What one engine with more memory says."""
    llm = LLM(str(path), dtype="float32", kv_memory_bytes=512 * MIB)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in prompts],
        [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=2)
            for _, count in prompts
        ],
        sequential=True,
    )
    return [(list(one.token_ids), [told.logprob for told in one.logprobs or []]) for one in outputs]


def sections(url: str, name: str) -> dict[str, int]:
    """Sections of each instance, ``lent`` or ``borrowed``."""
    told = httpx.get(f"{url}/cluster", timeout=60).json()["instances"]
    return {one["id"]: one["sections"][name] for one in told}


def hosts(url: str) -> dict[str, str]:
    told = httpx.get(f"{url}/cluster", timeout=60).json()["instances"]
    return {one["id"]: one["host"] for one in told}


@pytest.mark.long
def test_a_prompt_of_four_pools_on_two_machines(smollm2_path: Path, tmp_path: Path) -> None:
    prompts = [(text_of(TOKENS), LONG_ANSWER)]
    prompts += [(text_of(SHORT, 41 * index + 7), SHORT_ANSWER) for index in range(2)]
    expected = alone(smollm2_path, prompts)
    cache = smollm2_path.parent
    environ = os.environ | {"KVELL_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json"]
    command += ["--kv-memory", "48MiB", "--dtype", "float32", "--instances", "mixed=6"]
    stderr = tmp_path / "stderr"
    with (
        two_machines(cache) as (head, _),
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
            at = hosts(url)
            assert set(at.values()) == {HEAD, OTHER} and len(at) == 6
            with ThreadPoolExecutor(3) as pool:
                long, *short = [pool.submit(said, url, *one) for one in prompts]
                lent: set[str] = set()
                while not long.done():
                    lent |= {name for name, count in sections(url, "lent").items() if count}
                assert [long.result(), *(one.result() for one in short)] == expected
            assert {at[name] for name in lent} == {HEAD, OTHER}, "both machines lent"
            until(lambda: not any(sections(url, "lent").values()))
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_SECONDS) == 0
