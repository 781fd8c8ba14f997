"""Workloads of the routing matrix: what their prompts share, and how they reach the replay."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bench.routing import matrix
from bench.routing.matrix import (
    BLOCK_TOKENS,
    FORKS_OF_A_TEXT,
    TEXT_TOKENS,
    TEXTS,
    Case,
    edits,
    forks,
    run,
    shared,
    trace_of,
)
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import read_trace

BLOCKS = TEXT_TOKENS // BLOCK_TOKENS


def overlap(row: TraceRow, other: TraceRow) -> int:
    both = zip(row.block_ids, other.block_ids, strict=False)
    return next((at for at, (a, b) in enumerate(both) if a != b), min(map(len_of, (row, other))))


def len_of(row: TraceRow) -> int:
    return len(row.block_ids)


@pytest.mark.parametrize("seed", [0, 1])
class TestForks:
    def test_ways_of_a_text_share_a_quarter_at_least(self, seed: int) -> None:
        rows = forks(4 * FORKS_OF_A_TEXT, seed)
        for first in range(0, len(rows), FORKS_OF_A_TEXT):
            ways = rows[first : first + FORKS_OF_A_TEXT]
            for row, other in pairwise(ways):
                assert overlap(row, other) == min(len_of(row), len_of(other)) >= BLOCKS // 4
            assert len({len_of(row) for row in ways}) > 1, "they part at different places"

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


def test_a_made_workload_is_written_for_the_replay(tmp_path: Path) -> None:
    path = trace_of(Case("forks", "session", "mixed=2", 5.0, 12), tmp_path)
    assert [len_of(row) for row in read_trace(Path(path))] == list(map(len_of, forks(12, 0)))
    assert trace_of(Case("react-like", "session", "mixed=2", 5.0, 12), tmp_path) == "react-like"


def test_a_case_is_one_replay_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case("loogle-like", "prompt-tree", "prefill=2,decode=1", 100.0, 12, share=2)
    found = run(case)
    assert (found["finished"], found["refused"]) == (12, 0)
    assert 0 < found["ttft_mean"] <= found["ttft_p99"] and 0 < found["hit_rate"] < 1
    matrix.show([found])
    assert "prompt-tree" in capsys.readouterr().out
