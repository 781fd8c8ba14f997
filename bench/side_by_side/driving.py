"""A scenario against a server, through the load generator of ``kvell bench serve``."""

import asyncio
from collections.abc import Sequence
from typing import Any

from bench.side_by_side.scenarios import Figures, Scenario
from kvell.load.driver import Load, LoadResult, measure
from kvell.load.http.client import HttpClient
from kvell.load.http.wire import Wire
from kvell.load.outcome import Outcome
from kvell.load.prompts import Prompts, id_prompts, text_prompts
from kvell.load.report import Objectives, summary
from kvell.simulator.traces.rows import TraceRow

VOCAB_SIZE = 40_000
TIMEOUT_SECONDS = 600.0


def drive(base_url: str, scenario: Scenario, seed: int) -> LoadResult:
    """Send all requests of a round; return their outcomes."""
    rows = scenario.rows(seed)
    prompts = made_prompts(rows, seed)
    load = Load(rows, [None] * len(rows), timeout_seconds=TIMEOUT_SECONDS)

    async def run() -> LoadResult:
        client = HttpClient(base_url)
        try:
            return await measure(client, base_url, Wire(""), prompts, load)
        finally:
            client.close()

    return asyncio.run(run())


def made_prompts(rows: Sequence[TraceRow], seed: int) -> Prompts[Any]:
    """Prompts as token ids, which are exact; as text where a turn continues an answer."""
    if any(row.continues for row in rows):
        return text_prompts(rows, seed)
    return id_prompts(rows, seed, VOCAB_SIZE, lambda _text: [])


def figures_of(measured: LoadResult) -> Figures:
    """The figures that systems are compared by.

    :raises RuntimeError: if a request lacks its whole answer.
    """
    outcomes: list[Outcome] = list(measured.outcomes)
    report: dict[str, Any] = summary(outcomes, Objectives())
    if report["failed"]:
        raise RuntimeError(f"requests failed: {report['failures']}")
    seconds = report["duration_seconds"]
    found = {
        "seconds": seconds,
        "output_tokens_per_second": report["output_tokens_per_second"],
        "prompt_tokens_per_second": report["prompt_tokens"] / seconds,
        "requests_per_second": report["request_rate"],
    }
    for name in ("ttft", "tpot", "e2e"):
        for part in ("p50", "p99"):
            value = report[f"{name}_seconds"][part]
            if value is not None:
                found[f"{name}_{part}_seconds"] = value
    return found
