"""Workloads of the routing matrix: what their prompts share, and who knows where a state is."""

from itertools import pairwise

import numpy as np
import pytest

from bench.routing.matrix import (
    BLOCK_TOKENS,
    FORKS_OF_A_TEXT,
    OVERLAP,
    TEXT_TOKENS,
    TEXTS,
    Case,
    edits,
    forks,
    rows_of,
    run,
    shared,
)
from bench.routing.setting import HYBRID
from kvell.simulator.traces.rows import TraceRow

BLOCKS = TEXT_TOKENS // BLOCK_TOKENS


def overlap(one: TraceRow, other: TraceRow) -> int:
    """Blocks that two prompts begin with."""
    both = zip(one.block_ids, other.block_ids, strict=False)
    return next((at for at, (a, b) in enumerate(both) if a != b), min(map(len_of, (one, other))))


def len_of(row: TraceRow) -> int:
    return len(row.block_ids)


@pytest.mark.parametrize("seed", [0, 1])
class TestForks:
    def test_ways_of_a_text_share_a_quarter_at_least(self, seed: int) -> None:
        rows = forks(4 * FORKS_OF_A_TEXT, seed)
        for first in range(0, len(rows), FORKS_OF_A_TEXT):
            ways = rows[first : first + FORKS_OF_A_TEXT]
            for one, other in pairwise(ways):
                assert overlap(one, other) == min(len_of(one), len_of(other)) >= BLOCKS // 4
            assert len({len_of(one) for one in ways}) > 1, "they part at different places"

    def test_texts_share_nothing(self, seed: int) -> None:
        rows = forks(3 * FORKS_OF_A_TEXT, seed)
        firsts = {int(row.block_ids[0]) for row in rows}
        assert len(firsts) == 3
        of_texts = [
            np.concatenate([row.block_ids for row in rows if row.block_ids[0] == first])
            for first in sorted(firsts)
        ]
        assert not np.intersect1d(of_texts[0], of_texts[1]).size

    def test_equal_seeds_have_equal_rows(self, seed: int) -> None:
        assert list(map(len_of, forks(12, seed))) == list(map(len_of, forks(12, seed)))
        assert list(map(len_of, forks(12, seed))) != list(map(len_of, forks(12, seed + 1)))


def test_edits_come_back_to_few_texts() -> None:
    rows = edits(200, 0)
    assert len({int(row.block_ids[0]) for row in rows}) == TEXTS
    assert all(BLOCKS // 4 <= len_of(row) < BLOCKS for row in rows)


def test_a_shared_session_comes_under_other_names() -> None:
    rows = [TraceRow(0.0, 10, 1, session="a"), TraceRow(1.0, 10, 1)]
    assert [row.session for row in shared(rows, 2)] == ["a/0", "a/1", None, None]


def test_rates_count_each_instance_that_computes_prompts() -> None:
    split = (("prefill", 2), ("decode", 1))
    rows = rows_of(Case("forks", "prompt-tree", split, rate=5.0, requests=300))
    assert len(rows) == 600
    assert rows[-1].arrival_s == pytest.approx(60.0, rel=0.15)


@pytest.mark.long
def test_overlaps_of_tokens_promise_more_than_can_be_resumed() -> None:
    """So prompts go where nothing is saved, and first tokens come later than in turn."""

    def seconds(policy: str) -> float:
        case = Case("forks", policy, (("mixed", 4),), 2.5, 40, model=HYBRID)
        found = run(case)
        assert found["finished"] == 160
        return float(found["ttft_mean"])

    assert seconds("prompt-tree") < seconds("round-robin") < seconds(OVERLAP)
