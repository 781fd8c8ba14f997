"""The line of statistics: right figures, and silence without traffic."""

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.clock import VirtualClock
from kvell.engine.protocol.statistics import Stats
from kvell.errors import TryLater
from kvell.front.front import Front
from kvell.front.request_log import RequestObserver
from kvell.server.logs.lines import FIELDS
from kvell.server.logs.statistics import Statistics, Totals, rates_between, statistics_lines
from kvell.server.metrics.front_metrics import ServerMetrics

QUIET = Stats(0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0, 0)


@dataclass
class Scene:
    """A front and metrics that say what a test wants."""

    waiting: int = 0
    in_flight: int = 0
    tokens: tuple[int, int] = (0, 0)
    told: dict[str, Stats] = field(default_factory=dict)
    asked: int = 0

    async def stats(self, deadline_seconds: float, *, with_audit: bool = False) -> dict[str, Stats]:
        self.asked += 1
        if not self.told:
            raise TryLater("silent")
        return self.told

    def token_totals(self) -> tuple[int, int]:
        return self.tokens


def statistics_of(scene: Scene, clock: VirtualClock | None = None) -> Statistics:
    return Statistics(cast(Front, scene), cast(ServerMetrics, scene), clock)


def line_after(statistics: Statistics, clock: VirtualClock, seconds: float) -> object:
    clock.advance(seconds)
    return asyncio.run(statistics.fields())


def test_figures_are_of_the_time_since_the_last_line() -> None:
    scene, clock = Scene(), VirtualClock()
    statistics = statistics_of(scene, clock)
    scene.tokens, scene.waiting = (1000, 50), 2
    one = replace(QUIET, running=3, waiting=1, kv_cache_usage=0.5)
    scene.told = {"a": replace(one, prefix_cache_queries=1000, prefix_cache_hits=250)}
    assert line_after(statistics, clock, 10.0) == {
        "running": 3,
        "waiting": 3,
        "prompt_tokens_per_second": 100.0,
        "output_tokens_per_second": 5.0,
        "hit_rate": 0.25,
        "kv_usage": 0.5,
    }
    scene.tokens = (1100, 150)
    first = replace(QUIET, running=1, kv_cache_usage=0.2)
    scene.told = {
        "a": replace(first, prefix_cache_queries=1050, prefix_cache_hits=300),
        "b": replace(QUIET, running=1, prefix_cache_queries=50, kv_cache_usage=0.4),
    }
    assert line_after(statistics, clock, 5.0) == {
        "running": 2,
        "waiting": 2,
        "prompt_tokens_per_second": 20.0,
        "output_tokens_per_second": 20.0,
        "hit_rate": 0.5,
        "kv_usage": 0.3,
    }


def test_without_traffic_no_instance_is_asked() -> None:
    scene, clock = Scene(tokens=(5, 5)), VirtualClock()
    statistics = statistics_of(scene, clock)
    assert line_after(statistics, clock, 10.0) is None
    assert scene.asked == 0
    scene.in_flight = 1
    assert line_after(statistics, clock, 10.0) is not None


def test_a_pause_does_not_thin_out_what_follows() -> None:
    scene, clock = Scene(), VirtualClock()
    statistics = statistics_of(scene, clock)
    assert line_after(statistics, clock, 1000.0) is None
    scene.tokens = (100, 10)
    told = line_after(statistics, clock, 10.0)
    assert isinstance(told, dict)
    assert (told["prompt_tokens_per_second"], told["output_tokens_per_second"]) == (10.0, 1.0)


def test_silent_instances_leave_their_figures_out() -> None:
    scene, clock = Scene(waiting=1, in_flight=4), VirtualClock()
    statistics = statistics_of(scene, clock)
    assert line_after(statistics, clock, 1.0) == {
        "running": 4,
        "waiting": 1,
        "prompt_tokens_per_second": 0.0,
        "output_tokens_per_second": 0.0,
    }
    scene.told = {"a": replace(QUIET, prefix_cache_queries=10, prefix_cache_hits=5)}
    told = line_after(statistics, clock, 1.0)
    assert isinstance(told, dict)
    assert told["hit_rate"] == 0.5


def test_silence_in_between_loses_no_hits() -> None:
    scene, clock = Scene(in_flight=1), VirtualClock()
    statistics = statistics_of(scene, clock)
    scene.told = {"a": replace(QUIET, prefix_cache_queries=100)}
    line_after(statistics, clock, 1.0)
    scene.told = {}
    line_after(statistics, clock, 1.0)
    scene.told = {"a": replace(QUIET, prefix_cache_queries=110, prefix_cache_hits=10)}
    told = line_after(statistics, clock, 1.0)
    assert isinstance(told, dict)
    assert told["hit_rate"] == 1.0


counts = st.integers(0, 10**9)


@given(counts, counts, counts, counts, counts, counts, st.floats(0.001, 1e6))
def test_rates_are_differences_and_hits_a_share(
    prompt: int, output: int, looked: int, found: int, more: int, hits: int, seconds: float
) -> None:
    before = Totals(prompt, output, looked, found)
    after = Totals(prompt + more, output + hits, looked + more, found + hits)
    told = rates_between(before, after, seconds)
    assert told["prompt_tokens_per_second"] == round(more / seconds, 1)
    assert told["output_tokens_per_second"] == round(hits / seconds, 1)
    assert ("hit_rate" in told) == (more > 0 and hits <= more)
    assert 0 <= told.get("hit_rate", 0) <= 1


def test_an_instance_that_restarted_has_no_hit_rate() -> None:
    before, after = Totals(10, 10, 1000, 500), Totals(20, 20, 30, 10)
    assert "hit_rate" not in rates_between(before, after, 1.0)


async def test_lines_come_until_the_block_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvell")
    enough = asyncio.Event()
    scene = Scene(in_flight=1, told={"a": QUIET})

    class Counting(Statistics):
        async def fields(self) -> dict[str, float] | None:
            if scene.asked == 3:
                enough.set()
            return await super().fields()

    lines = Counting(cast(Front, scene), cast(ServerMetrics, scene))
    async with statistics_lines(lines, 0.001):
        await enough.wait()
    assert len(asyncio.all_tasks()) == 1
    assert len(caplog.records) >= 3
    assert caplog.records[0].getMessage() == "statistics"
    assert getattr(caplog.records[0], FIELDS)["running"] == 0


def test_no_interval_is_no_line() -> None:
    scene = Scene(in_flight=1)

    async def served() -> int:
        async with statistics_lines(statistics_of(scene), 0.0):
            return len(asyncio.all_tasks())

    assert asyncio.run(served()) == 1


def test_metrics_count_tokens_that_were_only_noted() -> None:
    metrics = ServerMetrics("m")
    observer: RequestObserver = metrics
    observer.first_tokens(0.1, 2, 30)
    observer.next_tokens(0.1, 3)
    assert metrics.token_totals() == (30, 5)
    observer.next_tokens(0.1, 1)
    assert metrics.token_totals() == (30, 6)
