"""``kvell serve --instances prefill=1,decode=1`` with a real model: the same answers."""

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.llm.disaggregated import Server, until
from tests.llm.servers import PATIENCE_SECONDS, serving

DATA = Path(__file__).parents[1] / "data"
ROLES = ("prefill-0", "decode-0")
ROWS = [json.loads(row) for row in (DATA / "smollm2_greedy.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=["memory", pytest.param("tcp", marks=pytest.mark.long)])
def server(smollm2_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    flags = ["--kv-memory", "128MiB", "--dtype", "float32", "--instances", "prefill=1,decode=1"]
    with serving(smollm2_path.parent, *flags, "--page-transport", request.param) as served:
        yield Server(served.url)


def tokens_of(server: Server, prompt: list[int], max_tokens: int, **more: Any) -> list[int]:
    reply = server.client.completions.create(
        model="smollm2",
        prompt=prompt,
        max_tokens=max_tokens,
        extra_body={"return_token_ids": True, **more.pop("extra", {})},
        **({"temperature": 0} | more),
    )
    found: list[int] = reply.choices[0].token_ids  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("count", "max_tokens"), [(10, 24), pytest.param(50, 64, marks=pytest.mark.long)]
)
def test_prompts_over_http(server: Server, count: int, max_tokens: int) -> None:
    """Prompts are computed at one instance, and all but the first token at the other."""
    rows = ROWS[:count]

    def told() -> list[float]:
        computed = [server.counted("prompt_tokens_by_source_total", one) for one in ROLES]
        return [*computed, server.counted("steps_total", "decode-0")]

    before = told()
    with ThreadPoolExecutor(10) as pool:
        answers = pool.map(lambda row: tokens_of(server, row["prompt_token_ids"], max_tokens), rows)
        assert list(answers) == [row["token_ids"][:max_tokens] for row in rows]
    *computed, steps = (now - then for now, then in zip(told(), before, strict=True))
    assert computed == [sum(len(row["prompt_token_ids"]) for row in rows), 0]
    assert steps >= max_tokens - 1
    assert server.is_clean()


def test_penalties_grammars_and_seeds_go_along(server: Server) -> None:
    """One server with one instance would say the same: so does this one, asked twice."""
    prompt = ROWS[0]["prompt_token_ids"]
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 7},
        {"frequency_penalty": 1.5, "extra": {"repetition_penalty": 1.2}},
        {"extra": {"guided_regex": "[a-f]{5} [0-9]{4}"}},
    ]
    for more in asked:
        once, again = (tokens_of(server, prompt, 24, **dict(more)) for _ in range(2))
        assert once == again and once
    reply = server.client.completions.create(
        model="smollm2",
        prompt=prompt,
        max_tokens=24,
        temperature=0,
        extra_body={"guided_regex": "[a-f]{5} [0-9]{4}"},
    )
    assert re.fullmatch("[a-f]{5} [0-9]{4}", reply.choices[0].text)


@pytest.mark.parametrize(
    ("dies", "count"),
    [
        ("decode-0", 8),
        pytest.param("decode-0", 50, marks=pytest.mark.long),
        pytest.param("prefill-0", 50, marks=pytest.mark.long),
    ],
)
def test_a_death_loses_no_request(server: Server, dies: str, count: int) -> None:
    """Killed while requests are under way on both: they end exactly, by another attempt."""
    rows = ROWS[:count]
    until(lambda: all(one["state"] == "serving" for one in server.instances().values()))
    pid = server.instances()[dies]["pid"]
    before = server.counted("steps_total", "decode-0")
    with ThreadPoolExecutor(10) as pool:
        answers = [pool.submit(tokens_of, server, row["prompt_token_ids"], 64) for row in rows]
        until(lambda: server.counted("steps_total", "decode-0") > before)
        os.kill(pid, signal.SIGKILL)
        until(lambda: server.instances()[dies]["restarts"] > 0)
        told = [answer.result(PATIENCE_SECONDS) for answer in answers]
    assert told == [row["token_ids"] for row in rows]
    until(lambda: all(one["state"] == "serving" for one in server.instances().values()))
    assert server.is_clean()
    assert tokens_of(server, ROWS[1]["prompt_token_ids"], 64) == ROWS[1]["token_ids"]
