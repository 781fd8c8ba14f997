"""Which pool is chosen, what is compared in it, and when a bound counts as kept."""

from itertools import pairwise

import numpy as np
import pytest

from bench.managers.shared_prefixes import (
    ARTICLES,
    RULES,
    WORKLOADS,
    Pool,
    Sweep,
    articles,
    closest,
    fitting_pool_bytes,
    hit_rate,
    in_pool,
    verdicts,
)
from bench.replay.shapes import read_shape
from kvell.simulator.traces.rows import TraceRow, ideal_hit_rate
from kvell.vocabulary import GIB

ALL_AT_ONCE = WORKLOADS[1]
PLAIN, OURS, PROTECTED = (rule.name for rule in RULES)


def pool(size: int, *rates: float, refused: int = 0, workload: str = "") -> Pool:
    hits = dict(zip((PLAIN, OURS, PROTECTED), rates, strict=True))
    return Pool(workload, size, hits, {PLAIN: refused, OURS: 0, PROTECTED: 0})


def sweeps(*pairs: tuple[float, float]) -> list[Sweep]:
    return [
        Sweep(n, GIB, {PLAIN: plain, OURS: ours, PROTECTED: ours}, 0.8)
        for n, (plain, ours) in enumerate(pairs, start=1)
    ]


def test_articles_are_asked_five_times_each_in_an_order_that_mixes_them() -> None:
    rows = articles(4)
    texts = [tuple(row.block_ids.tolist()) for row in rows]
    assert len(rows) == 20
    assert len(set(texts)) == 4
    assert sum(a != b for a, b in pairwise(texts)) > 8
    assert ideal_hit_rate(rows) == pytest.approx(0.8, abs=0.01)


def test_the_pool_is_the_one_where_plain_hits_come_closest() -> None:
    pools = [pool(1, 0.01, 0.1, 0.1), pool(2, 0.03, 0.2, 0.2), pool(3, 0.2, 0.3, 0.3)]
    assert closest(pools, 0.024).pool_bytes == 2
    assert closest(pools, 0.19).pool_bytes == 3


def test_a_pool_that_refuses_requests_is_not_chosen() -> None:
    pools = [pool(1, 0.024, 0.1, 0.1, refused=2), pool(2, 0.2, 0.2, 0.2)]
    assert closest(pools, 0.024).pool_bytes == 2


def test_gains_are_over_the_rule_before() -> None:
    each = pool(1, 0.02, 0.08, 0.12)
    assert each.gain(1) == pytest.approx(4)
    assert each.gain(2) == pytest.approx(1.5)
    assert pool(1, 0.0, 0.1, 0.1).gain(1) == float("inf")


def chosen(of_articles: Pool, of_mooncake: Pool) -> dict[str, Pool]:
    return {one.name: of_articles if one.trace == ARTICLES else of_mooncake for one in WORKLOADS}


def test_bounds_are_kept_or_missed_by_what_was_measured() -> None:
    good = chosen(pool(1, 0.02, 0.08, 0.08), pool(1, 0.1, 0.12, 0.12))
    flat = sweeps((0.8, 0.8), (0.8, 0.8), (0.8, 0.8), (0.4, 0.7))
    assert all(verdicts(good, flat).values())
    weak = chosen(pool(1, 0.02, 0.05, 0.08), pool(1, 0.1, 0.105, 0.12))
    assert list(verdicts(weak, flat).values()) == [False, False, True, True]
    apart = sweeps((0.8, 0.8), (0.8, 0.7), (0.8, 0.8), (0.4, 0.6))
    assert list(verdicts(good, apart).values()) == [True, True, False, False]


def short_articles() -> list[TraceRow]:
    """Three texts of 4,096 tokens, asked in turn, two rounds."""
    texts = [np.arange(8 * n, 8 * n + 8, dtype=np.int64) for n in range(3)]
    return [TraceRow(float(i), 4_160, 4, texts[i % 3], 512) for i in range(6)]


def test_knowing_the_windows_keeps_what_all_layers_would_lose() -> None:
    """A pool of about two texts over all layers holds ten where five of six layers have windows."""
    shape, calls = read_shape("gemma3-27b"), []
    found = in_pool(shape, ALL_AT_ONCE, short_articles(), 5 * GIB, lambda: calls.append(1))
    assert len(calls) == len(RULES)
    assert not any(found.requests_refused.values())
    assert found.hits[OURS] > found.hits[PLAIN]


def test_the_pool_for_few_articles_is_the_least_that_loses_nothing() -> None:
    shape, rows = read_shape("gemma3-27b"), short_articles()
    size = fitting_pool_bytes(shape, rows, 16, lambda: None)
    assert size < 16 * GIB
    least = ideal_hit_rate(rows) * 0.995
    assert hit_rate(shape, rows, size, RULES[0])[0] >= least
    assert hit_rate(shape, rows, size - GIB, RULES[0])[0] < least


def test_one_at_a_time_keeps_more_than_many_at_once() -> None:
    """Who runs takes what could be kept: ten texts of 4,096 tokens, each asked about twice."""
    texts = [np.arange(8 * n, 8 * n + 8, dtype=np.int64) for n in range(10)]
    rows = [TraceRow(float(i), 4_160, 200, texts[i % 10], 512) for i in range(20)]
    shape = read_shape("gemma3-27b")
    alone, many = (hit_rate(shape, rows, 10 * GIB, RULES[1], most)[0] for most in (1, 256))
    assert alone > many
