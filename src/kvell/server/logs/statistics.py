"""A line of statistics now and then, while there is traffic."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from kvell.clock import Clock, MonotonicClock
from kvell.engine.protocol.statistics import Stats
from kvell.errors import TryLater
from kvell.server.logs.lines import tell

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""Instances that are silent for longer are left out of a line."""


@dataclass(frozen=True)
class Totals:
    """Counters since the start.

    :param looked_up_tokens: prompt tokens that instances looked up; ``found_tokens`` were cached.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    looked_up_tokens: int = 0
    found_tokens: int = 0


class Traffic(Protocol):
    """Where requests are (the front)."""

    @property
    def waiting(self) -> int:
        """Requests that wait for an instance."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests that instances hold."""
        ...

    async def stats(self, deadline_seconds: float) -> dict[str, Stats]:
        """Counters of every instance that answers in time."""
        ...


class TokenTotals(Protocol):
    """Who counts tokens (the metrics)."""

    def token_totals(self) -> tuple[int, int]:
        """Prompt tokens that were prefilled and output tokens that were sent out."""
        ...


class Statistics:
    """Says what has happened since it was asked last."""

    def __init__(self, traffic: Traffic, tokens: TokenTotals, clock: Clock | None = None) -> None:
        self._traffic, self._tokens = traffic, tokens
        self._clock = clock or MonotonicClock()
        self._told_seconds = self._clock.now_seconds()
        self._told = Totals(*tokens.token_totals())

    async def fields(self) -> dict[str, float] | None:
        """The fields of a line; None if nothing runs and nothing was made since the last."""
        prompt_tokens, output_tokens = self._tokens.token_totals()
        before, began_seconds = self._told, self._told_seconds
        self._told_seconds = self._clock.now_seconds()
        is_still = (prompt_tokens, output_tokens) == (before.prompt_tokens, before.output_tokens)
        if is_still and not self._traffic.in_flight and not self._traffic.waiting:
            return None
        told = await self._answers()
        looked_up = sum(one.prefix_cache_queries for one in told.values())
        found = sum(one.prefix_cache_hits for one in told.values())
        now = Totals(prompt_tokens, output_tokens, looked_up, found)
        self._told = now if told else _without_answers(now, before)
        waiting = self._traffic.waiting + sum(one.waiting for one in told.values())
        running = sum(one.running for one in told.values()) if told else self._traffic.in_flight
        rates = rates_between(before, self._told, self._told_seconds - began_seconds)
        return {"running": running, "waiting": waiting, **rates, **_usage(told)}

    async def _answers(self) -> Mapping[str, Stats]:
        try:
            return await self._traffic.stats(ANSWER_SECONDS)
        except TryLater:
            return {}


def rates_between(before: Totals, after: Totals, seconds: float) -> dict[str, float]:
    """Tokens per second in and out, and the cached share of prompts if any were looked up.

    Counters of instances start anew when one restarts; then the share is left out.
    """
    seconds = max(seconds, 1e-9)
    rates = {
        "prompt_tokens_per_second": (after.prompt_tokens - before.prompt_tokens) / seconds,
        "output_tokens_per_second": (after.output_tokens - before.output_tokens) / seconds,
    }
    told = {name: round(rate, 1) for name, rate in rates.items()}
    looked_up = after.looked_up_tokens - before.looked_up_tokens
    found = after.found_tokens - before.found_tokens
    if looked_up > 0 and 0 <= found <= looked_up:
        told["hit_rate"] = round(found / looked_up, 3)
    return told


@asynccontextmanager
async def statistics_lines(statistics: Statistics, interval_seconds: float) -> AsyncIterator[None]:
    """Log a line each interval while the block runs; 0 logs none."""
    if not interval_seconds:
        yield
        return
    telling = asyncio.create_task(_tell_again_and_again(statistics, interval_seconds))
    try:
        yield
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling


async def _tell_again_and_again(statistics: Statistics, interval_seconds: float) -> None:
    while True:
        await asyncio.sleep(interval_seconds)
        fields = await statistics.fields()
        if fields is not None:
            tell(logger, logging.INFO, "statistics", **fields)


def _without_answers(now: Totals, before: Totals) -> Totals:
    looked_up, found = before.looked_up_tokens, before.found_tokens
    return Totals(now.prompt_tokens, now.output_tokens, looked_up, found)


def _usage(told: Mapping[str, Stats]) -> dict[str, float]:
    """The used part of all KV pools, which are alike."""
    if not told:
        return {}
    used = sum(one.kv_cache_usage for one in told.values()) / len(told)
    return {"kv_usage": round(used, 3)}
