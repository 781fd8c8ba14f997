"""The common page pool in virtual time: articles, several questions to each, in a random order."""

from dataclasses import replace
from typing import Any

import numpy as np

from kvell.clock import VirtualClock
from kvell.memory import create_core
from kvell.simulator.traces.rows import TraceRow
from tests.simulator.replays import MACHINE, Replay, layers_in, layout_of, limits_of, row

LAYERS = ((16, 2), (0, 1))


def articles(seed: int, count: int = 12, questions: int = 8) -> list[TraceRow]:
    """Articles of eighty tokens, and a few tokens for the question."""
    draw = np.random.default_rng(seed)
    order = draw.permutation(np.repeat(np.arange(count), questions)).tolist()
    return [
        row(82 + int(draw.integers(6)), 2, range(20 * a, 20 * a + 20), at=float(i))
        for i, a in enumerate(order)
    ]


def report(rows: list[TraceRow], *, common_pool: bool, share: float | None = 0.5) -> dict[str, Any]:
    layout = layout_of(*LAYERS, large_pages=60)
    limits = replace(
        limits_of(layout),
        common_pool=common_pool,
        common_pool_chunk_tokens=8,
        common_pool_share=share,
    )
    run = Replay(
        create_core(layout), layers_in(layout), limits, rows, "start", MACHINE, VirtualClock()
    )
    run.run()
    return run.report()


def test_more_hits_where_articles_push_each_other_out() -> None:
    rows = articles(seed=1)
    off, on = report(rows, common_pool=False), report(rows, common_pool=True)
    assert on["requests_finished"] == off["requests_finished"] == len(rows)
    assert off["hit_rate"] < on["hit_rate"]
    assert on["protected_prefixes"] > 0
    assert off["protected_prefixes"] == 0


def test_leases_are_no_running_requests() -> None:
    run = report(articles(seed=2), common_pool=True)
    assert run["batch_mean"] <= run["max_running"]


def test_the_same_trace_gives_the_same_report() -> None:
    rows = articles(seed=3)
    first, second = (report(rows, common_pool=True, share=None) for _ in range(2))
    for name in ("hit_rate", "virtual_seconds", "steps", "rungs", "protected_tokens"):
        assert first[name] == second[name]
