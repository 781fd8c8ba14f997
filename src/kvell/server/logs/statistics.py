"""A periodic log line of statistics while there is traffic."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from kvell.clock import Clock, MonotonicClock
from kvell.engine.protocol.statistics import Stats
from kvell.front.front import Front
from kvell.server.logs.lines import tell
from kvell.server.map.recorder import running
from kvell.server.metrics.front_metrics import ServerMetrics, answered_stats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Totals:
    """The counters since the start.

    :param looked_up_tokens: prompt tokens that instances looked up; ``found_tokens`` were cached.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    looked_up_tokens: int = 0
    found_tokens: int = 0


class Statistics:
    """The statistics of the time since the previous line."""

    def __init__(self, front: Front, metrics: ServerMetrics, clock: Clock | None = None) -> None:
        self._front, self._metrics = front, metrics
        self._clock = clock or MonotonicClock()
        self._told_seconds = self._clock.now_seconds()
        self._told = Totals(*metrics.token_totals())

    async def fields(self) -> dict[str, float] | None:
        """Return the fields of a line; None without requests or new tokens."""
        prompt_tokens, output_tokens = self._metrics.token_totals()
        before = self._told
        began_seconds = self._told_seconds
        self._told_seconds = self._clock.now_seconds()
        is_still = (prompt_tokens, output_tokens) == (before.prompt_tokens, before.output_tokens)
        if is_still and not self._front.in_flight and not self._front.waiting:
            return None
        answers = await answered_stats(self._front)
        looked_up = sum(stats.prefix_cache_queries for stats in answers.values())
        cached = sum(stats.prefix_cache_hits for stats in answers.values())
        if not answers:
            looked_up, cached = before.looked_up_tokens, before.found_tokens
        self._told = Totals(prompt_tokens, output_tokens, looked_up, cached)
        waiting = self._front.waiting + sum(stats.waiting for stats in answers.values())
        running = (
            sum(stats.running for stats in answers.values()) if answers else self._front.in_flight
        )
        rates = rates_between(before, self._told, self._told_seconds - began_seconds)
        return {"running": running, "waiting": waiting, **rates, **_usage(answers)}


def rates_between(before: Totals, after: Totals, seconds: float) -> dict[str, float]:
    """Return input and output tokens per second, and the cached share of looked-up tokens.

    The share is left out if no tokens were looked up, or if a restart has reset counters.
    """
    seconds = max(seconds, 1e-9)
    rates = {
        "prompt_tokens_per_second": (after.prompt_tokens - before.prompt_tokens) / seconds,
        "output_tokens_per_second": (after.output_tokens - before.output_tokens) / seconds,
    }
    rounded = {name: round(rate, 1) for name, rate in rates.items()}
    looked_up = after.looked_up_tokens - before.looked_up_tokens
    cached = after.found_tokens - before.found_tokens
    if looked_up > 0 and 0 <= cached <= looked_up:
        rounded["hit_rate"] = round(cached / looked_up, 3)
    return rounded


def statistics_lines(
    statistics: Statistics, interval_seconds: float
) -> AbstractAsyncContextManager[None]:
    """Log a line each interval while the block runs; 0 logs none."""
    if not interval_seconds:
        return nullcontext()
    return running(partial(_tell_again_and_again, statistics, interval_seconds))


async def _tell_again_and_again(statistics: Statistics, interval_seconds: float) -> None:
    while True:
        await asyncio.sleep(interval_seconds)
        fields = await statistics.fields()
        if fields is not None:
            tell(logger, logging.INFO, "statistics", **fields)


def _usage(answers: Mapping[str, Stats]) -> dict[str, float]:
    if not answers:
        return {}
    used = sum(stats.kv_cache_usage for stats in answers.values()) / len(answers)
    return {"kv_usage": round(used, 3)}
