"""The time that serving over HTTP adds to the engine's steps, as clients see it.

A separate server answers a few concurrent requests with predictable steps. Their time per token and
to the first token exceeds the time of the engine's steps by that of serving. If clients and server
share cores, as in tests, the difference includes the clients.
"""

import asyncio
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
from kvell.load.driver import Load, measure
from kvell.load.http.client import HttpClient
from kvell.load.http.wire import Wire
from kvell.load.outcome import Outcome
from kvell.load.prompts import id_prompts
from kvell.models.sources.progress import Progress
from kvell.simulator.traces.rows import TraceRow
from kvell.wire.decoding import decode_json

BATCHES = (1, 4, 12)
ROUNDS = 4
PROMPT_TOKENS = 24
LONG_PROMPT_TOKENS = 256
LONG_PROMPTS = 4
"""Prompts one after the other in each round: a first token's time scatters more than a step's."""
OUTPUT_TOKENS = 40
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class ServingRound:
    """One round: the number of concurrent requests, and the medians of their latencies."""

    batch: int
    ttft_seconds: float
    tpot_seconds: float


@dataclass(frozen=True)
class LongPrompt:
    """A prompt that was the only request of the server."""

    prompt_tokens: int
    ttft_seconds: float


@contextmanager
def server(command: Sequence[str]) -> Iterator[str]:
    """Start a server and yield its URL.

    :param command: prints one line of JSON with ``url`` once it answers.
    :raises ChangeSomething: if it does not start.
    """
    with subprocess.Popen(list(command), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                problem = "the server did not start"
                raise ChangeSomething("--model", command[-1], problem, "use --no-serving")
            yield str(decode_json(line)["url"])
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def measure_serving(
    url: str, vocab_size: int, progress: Progress, rounds: int = ROUNDS
) -> tuple[list[ServingRound], list[LongPrompt]]:
    """Send batches of requests to a server, round by round; the first round is not counted."""
    rounds_served: list[ServingRound] = []
    alone: list[LongPrompt] = []
    asker = _Asker(url, vocab_size)
    for turn in range(rounds + 1):
        progress("asking a server", turn / (rounds + 1))
        served = [_served(asker.ask(batch, PROMPT_TOKENS)) for batch in BATCHES]
        prompts = [asker.ask(1, LONG_PROMPT_TOKENS) for _ in range(LONG_PROMPTS)]
        if turn:
            rounds_served += served
            alone += [LongPrompt(LONG_PROMPT_TOKENS, run.ttft_seconds) for (run,) in prompts]
    return rounds_served, alone


def _served(outcomes: Sequence[Outcome]) -> ServingRound:
    return ServingRound(
        len(outcomes),
        median(outcome.ttft_seconds for outcome in outcomes),
        median(outcome.tpot_seconds or 0.0 for outcome in outcomes),
    )


class _Asker:
    def __init__(self, url: str, vocab_size: int) -> None:
        self._url, self._vocab_size = url, vocab_size
        self._asked = 0

    def ask(self, batch: int, prompt_tokens: int) -> list[Outcome]:
        """Send requests together and return their outcomes.

        :raises RuntimeError: if a request got no complete answer.
        """
        self._asked += 1
        return asyncio.run(self._ask(batch, prompt_tokens, self._asked))

    async def _ask(self, batch: int, prompt_tokens: int, seed: int) -> list[Outcome]:
        rows = [TraceRow(0.0, prompt_tokens, OUTPUT_TOKENS) for _ in range(batch)]
        client = HttpClient(self._url)
        try:
            load = Load(rows, [None] * batch)
            prompts = id_prompts(rows, seed, self._vocab_size, lambda _text: [])
            measured = await measure(client, self._url, Wire(""), prompts, load)
        finally:
            client.close()
        failures = [outcome.failure for outcome in measured.outcomes if not outcome.is_complete]
        if failures:
            raise RuntimeError(f"the server did not answer: {failures[0]}")
        return list(measured.outcomes)


def fit_serving(
    calibration: Calibration, served: Sequence[ServingRound], prompts: Sequence[LongPrompt] = ()
) -> Serving:
    """Return what remains without the engine's own steps; no part is negative."""
    context = PROMPT_TOKENS + OUTPUT_TOKENS // 2
    batches = sorted({entry.batch for entry in served})
    left = [
        median(entry.tpot_seconds for entry in served if entry.batch == batch)
        - decode_seconds(calibration, [context] * batch)
        for batch in batches
    ]
    rows = np.asarray([[1.0, batch] for batch in batches])
    step, token = non_negative(rows, np.asarray(left)).tolist()
    alone = median(entry.ttft_seconds for entry in served if entry.batch == batches[0])
    first = prefill_seconds(calibration, PROMPT_TOKENS, 0.0) + step + token
    request = max(0.0, alone - first)
    return Serving(
        request, step, token, _prompt_token(calibration, prompts, request + step + token)
    )


def _prompt_token(
    calibration: Calibration, prompts: Sequence[LongPrompt], besides_seconds: float
) -> float:
    """Return the seconds per prompt token that serving adds to the calibrated engine."""
    if not prompts:
        return 0.0
    per_token = [
        (
            prompt.ttft_seconds
            - besides_seconds
            - prefill_seconds(calibration, prompt.prompt_tokens, 0.0)
        )
        / prompt.prompt_tokens
        for prompt in prompts
    ]
    return max(0.0, median(per_token))
