"""What serving over HTTP adds to the engine's steps, as clients see it.

A server of its own answers a few requests at once, of which the steps are known; what their
time per token and their first token take longer than the engine's steps is the serving's.
Where clients and server share cores, as they do in tests, that is in it too.
"""

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np

from kvell.cost.calibration import Calibration, Serving
from kvell.cost.least_squares import non_negative
from kvell.cost.model import decode_seconds, prefill_seconds
from kvell.errors import ChangeSomething
from kvell.load.driver import Load
from kvell.load.http import HttpClient
from kvell.load.outcome import Outcome
from kvell.load.prompts import id_prompts
from kvell.load.run import measure
from kvell.load.wire import Wire
from kvell.models.progress import Progress
from kvell.simulator.rows import TraceRow

BATCHES = (1, 4, 12)
ROUNDS = 4
PROMPT_TOKENS = 24
OUTPUT_TOKENS = 40
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Served:
    """One round: so many requests at once, and the medians of what they saw."""

    batch: int
    ttft_seconds: float
    tpot_seconds: float


@contextmanager
def server(command: Sequence[str]) -> Iterator[str]:
    """A server, and its URL.

    :param command: prints one line of JSON with ``url`` once it answers.
    :raises ChangeSomething: if it does not start.
    """
    with subprocess.Popen(list(command), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                problem = "no server of this model starts"
                raise ChangeSomething("--model", command[-1], problem, "use --no-serving")
            yield str(json.loads(line)["url"])
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def measure_serving(
    url: str, vocab_size: int, progress: Progress, rounds: int = ROUNDS
) -> list[Served]:
    """Ask a server, batch by batch, round by round; the first round is not counted."""
    found: list[Served] = []
    for turn in range(rounds + 1):
        for place, batch in enumerate(BATCHES):
            progress("asking a server", (turn + place / len(BATCHES)) / (rounds + 1))
            outcomes = asyncio.run(_asked(url, batch, vocab_size, turn))
            if turn:
                found.append(
                    Served(
                        batch,
                        median(one.ttft_seconds for one in outcomes),
                        median(one.tpot_seconds or 0.0 for one in outcomes),
                    )
                )
    return found


async def _asked(url: str, batch: int, vocab_size: int, turn: int) -> list[Outcome]:
    rows = [TraceRow(0.0, PROMPT_TOKENS, OUTPUT_TOKENS) for _ in range(batch)]
    client = HttpClient(url)
    try:
        load = Load(rows, [None] * batch)
        prompts = id_prompts(rows, 1000 * turn + batch, vocab_size, lambda _text: [])
        measured = await measure(client, url, Wire(""), prompts, load)
    finally:
        client.close()
    failures = [one.failure for one in measured.outcomes if not one.is_complete]
    if failures:
        raise RuntimeError(f"the server did not answer: {failures[0]}")
    return list(measured.outcomes)


def fit_serving(calibration: Calibration, served: Sequence[Served]) -> Serving:
    """What is left when the engine's own steps are taken off: never less than nothing."""
    context = PROMPT_TOKENS + OUTPUT_TOKENS // 2
    batches = sorted({one.batch for one in served})
    left = [
        median(one.tpot_seconds for one in served if one.batch == batch)
        - decode_seconds(calibration, [context] * batch)
        for batch in batches
    ]
    rows = np.asarray([[1.0, batch] for batch in batches])
    step, token = non_negative(rows, np.asarray(left)).tolist()
    alone = median(one.ttft_seconds for one in served if one.batch == batches[0])
    first = prefill_seconds(calibration, PROMPT_TOKENS, 0.0) + step + token
    return Serving(max(0.0, alone - first), step, token)
