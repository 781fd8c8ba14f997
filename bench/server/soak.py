"""Many streaming clients, of which some vanish midway, against one server for some minutes.

``python -m bench.server.soak --clients 200 --seconds 180``

It fails if a client sees an error that is not 429, if an answer has lost or doubled a token, if the
audit finds a contradiction, or if pages are still in use afterwards.  It measures what the front's
processor time is of the instance's.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench import result_file
from bench.side_by_side.processes import SystemProcess
from bench.side_by_side.systems import free_port

START_SECONDS = 180.0
PROMPTS = 40
OUTPUT_TOKENS = (8, 48)
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class Tally:
    """What clients saw.

    :ivar known: the tokens of each prompt's answer, as far as the longest client has seen.
    """

    counts: Counter[str] = field(default_factory=Counter)
    known: dict[int, list[int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def check(self, prompt: int, token_ids: list[int]) -> None:
        """Hold an answer, whole or cut off, against others to the same prompt."""
        known = self.known.setdefault(prompt, [])
        shorter = min(len(known), len(token_ids))
        if known[:shorter] != token_ids[:shorter]:
            self.problems.append(f"prompt {prompt}: {token_ids} is no answer like {known}")
        elif len(token_ids) > len(known):
            self.known[prompt] = token_ids


async def client(
    http: httpx.AsyncClient, url: str, number: int, until: float, vanish: float, tally: Tally
) -> None:
    """Ask again and again; hang up midway through a part of the answers."""
    draw = random.Random(number)
    while time.monotonic() < until:
        prompt = draw.randrange(PROMPTS)
        most = draw.randint(*OUTPUT_TOKENS)
        leaves_after = draw.randint(1, most) if draw.random() < vanish else None
        body = {
            "prompt": [100 + prompt, *range(200, 232)],
            "max_tokens": most,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        try:
            await _ask(http, url, body, prompt, leaves_after, tally)
        except httpx.HTTPError as error:
            tally.problems.append(f"{type(error).__name__}: {error}")


async def _ask(
    http: httpx.AsyncClient,
    url: str,
    body: dict[str, Any],
    prompt: int,
    leaves_after: int | None,
    tally: Tally,
) -> None:
    token_ids: list[int] = []
    used: int | None = None
    is_done = False
    async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            tally.counts["refused with 429"] += 1
            await asyncio.sleep(float(answer.headers["Retry-After"]))
            return
        if answer.status_code != httpx.codes.OK:
            tally.problems.append(f"status {answer.status_code}")
            return
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    tally.problems.append(str(chunk["error"]))
                for choice in chunk.get("choices", ()):
                    token_ids += choice["token_ids"]
                used = chunk["usage"]["completion_tokens"] if chunk.get("usage") else used
            if leaves_after is not None and len(token_ids) >= leaves_after and not is_done:
                break
    tally.check(prompt, token_ids)
    tally.counts["tokens"] += len(token_ids)
    if not is_done:
        tally.counts["vanished"] += 1
    elif len(token_ids) != used or used != body["max_tokens"]:
        tally.problems.append(f"{len(token_ids)} tokens came, {used} of {body['max_tokens']} used")
    else:
        tally.counts["whole"] += 1


async def soak(url: str, clients: int, seconds: float, vanish: float) -> Tally:
    """Run all clients for so long."""
    tally, until = Tally(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(timeout=120.0, limits=limits) as http:
        await asyncio.gather(
            *(client(http, url, number, until, vanish, tally) for number in range(clients))
        )
    return tally


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def settled(url: str) -> dict[str, Any]:
    """What the server says of itself once nothing runs any more."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        cluster = httpx.get(f"{url}/cluster", timeout=30).json()
        idle = not cluster["front"]["waiting"] and not any(
            one["in_flight"] for one in cluster["instances"]
        )
        metrics = httpx.get(f"{url}/metrics", timeout=30).text
        usage = [
            float(line.rpartition(" ")[2])
            for line in metrics.splitlines()
            if line.startswith("kvell:kv_cache_usage_perc")
        ]
        if idle and not any(usage):
            audit: dict[str, Any] = httpx.get(f"{url}/debug/audit", timeout=60).json()
            return {"audit": audit, "kv_cache_usage": usage}
        if time.monotonic() > deadline:
            return {"audit": {"clean": False, "problems": "not idle"}, "kv_cache_usage": usage}
        time.sleep(0.5)


def main(given: Sequence[str] | None = None) -> None:
    """Print the figures, write them to the bench's result file, and fail on any problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--vanish", type=float, default=0.2)
    parser.add_argument("--kv-mib", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=result_file.path_of("soak"))
    args = parser.parse_args(given)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", str(port)]
    command += [f"--kv-memory={args.kv_mib}MiB", f"--dtype={args.dtype}"]
    with tempfile.TemporaryDirectory() as folder:
        process = SystemProcess(command, Path(folder) / "server.log", {})
        try:
            process.wait_for(f"{url}/health", START_SECONDS)
            cluster = httpx.get(f"{url}/cluster").json()
            pids = cluster["front"]["pid"], cluster["instances"][0]["pid"]
            before = [processor_seconds(pid) for pid in pids]
            tally = asyncio.run(soak(url, args.clients, args.seconds, args.vanish))
            front, instance = (
                processor_seconds(pid) - spent for pid, spent in zip(pids, before, strict=True)
            )
            told = settled(url)
        finally:
            process.end()
    figures = {
        **tally.counts,
        "clients": args.clients,
        "seconds": args.seconds,
        "front_processor_seconds": front,
        "instance_processor_seconds": instance,
        "front_share": front / instance,
        "problems": tally.problems[:20],
        **told,
    }
    result_file.write(args.out, figures)
    print(json.dumps(figures, indent=1))
    if tally.problems or not told["audit"]["clean"] or any(told["kv_cache_usage"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
