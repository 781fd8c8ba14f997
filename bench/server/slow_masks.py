"""A tenant's time per token in a batch of 32 rows, 16 of them under another's slow grammar.

``python -m bench.server.slow_masks``

The grammar is ambiguous, so a mask takes tens of milliseconds and more.  Rounds alternate: the
tenant's 16 answers alone, the same beside 16 answers with the grammar, and beside 16 plain answers.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench import result_file
from bench.side_by_side.processes import SystemProcess
from bench.side_by_side.systems import free_port

AMBIGUOUS_GRAMMAR = 'start: s\ns: s s s | s s | "a" | "b"'
ROWS = 16
TOKENS = 96
START_SECONDS = 180.0
KEYS = "".join(f'[[keys]]\nname = "{name}"\nkey = "{name}"\n' for name in ("tenant", "hostile"))
BESIDE: dict[str, dict[str, Any] | None] = {
    "alone": None,
    "beside_a_slow_grammar": {"structured_outputs": {"grammar": AMBIGUOUS_GRAMMAR}},
    "beside_plain_answers": {},
}


async def answers(url: str) -> list[float]:
    """Return the mean seconds of a token after the first, of each of the tenant's answers."""
    headers = {"Authorization": "Bearer tenant"}
    async with httpx.AsyncClient(timeout=300, headers=headers) as http:
        return await asyncio.gather(*(_answer(http, url, number) for number in range(ROWS)))


async def _answer(http: httpx.AsyncClient, url: str, number: int) -> float:
    prompt = f"Question {number}: why is the sky blue?"
    sampling = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    times = list[float]()
    body = {"prompt": prompt, **sampling}
    async with http.stream("POST", f"{url}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    return (times[-1] - times[0]) / (TOKENS - 1)


async def hostile(url: str, fields: dict[str, Any], begun: asyncio.Event) -> int:
    """Ask for 16 answers in one request until cancelled; the event is set once tokens arrive."""
    body = {"prompt": "x", "n": ROWS, "max_tokens": 400, "temperature": 1, "ignore_eos": True}
    headers = {"Authorization": "Bearer hostile"}
    async with httpx.AsyncClient(timeout=300, headers=headers) as http:
        while True:
            sent = body | fields | {"stream": True}
            async with http.stream("POST", f"{url}/v1/completions", json=sent) as reply:
                pieces = 0
                async for line in reply.aiter_lines():
                    pieces += line.startswith("data: {")
                    if pieces > 4 * ROWS:  # by now the masks are slow
                        begun.set()


async def measure(url: str, fields: dict[str, Any] | None) -> float:
    """Return the median of the tenant's seconds per token, beside the hostile request if any."""
    if fields is None:
        return median(await answers(url))
    begun = asyncio.Event()
    beside = asyncio.create_task(hostile(url, fields, begun))
    waits = asyncio.create_task(begun.wait())
    await asyncio.wait([beside, waits], return_when=asyncio.FIRST_COMPLETED)
    if beside.done():
        waits.cancel()
        beside.result()
    try:
        return median(await answers(url))
    finally:
        beside.cancel()
        await asyncio.wait([beside])


def main(given: Sequence[str] | None = None) -> None:
    """Print the medians of all rounds and their ratios, and write the bench's result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(given)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.toml")
        keys.write_text(KEYS)
        keys.chmod(0o600)
        command = [sys.executable, "-m", "kvell.cli.main", "serve", args.model]
        command += [f"--port={port}", "--kv-memory=512MiB", f"--api-key-file={keys}"]
        server = SystemProcess(command, Path(folder, "server.log"), {})
        try:
            server.wait_for(f"{url}/health", START_SECONDS)
            asyncio.run(answers(url))  # the first touches memory
            rounds = [
                {name: asyncio.run(measure(url, fields)) for name, fields in BESIDE.items()}
                for _ in range(args.rounds)
            ]
        finally:
            server.end()
    milliseconds = {name: [1000 * each[name] for each in rounds] for name in BESIDE}
    medians = {name: median(values) for name, values in milliseconds.items()}
    ratios = {
        name: [each[name] / each["alone"] for each in rounds] for name in BESIDE if name != "alone"
    }
    figures = {"tpot_milliseconds": milliseconds, "medians": medians, "ratios": ratios}
    result_file.write(args.out or result_file.path_of("slow_masks"), figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
