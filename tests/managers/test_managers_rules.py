"""Rules of eviction side by side: the same work, whatever goes first, and hints only where told."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.managers.rules import RULES, main, measured, table_of
from bench.replay.shapes import read_shape
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import write_trace


def rows(count: int) -> list[TraceRow]:
    """Talks of two turns that come back after a while."""
    return [
        TraceRow(0.0, 700, 8, np.asarray([2 * (i % 7), 2 * (i % 7) + 1]), 350) for i in range(count)
    ]


def test_every_rule_does_the_same_work() -> None:
    found = measured(read_shape("llama3-8b"), "talks", rows(20), 3, times=2)
    assert [one.rule for one in found] == list(RULES)
    assert len({one.hit_rate > 0 for one in found}) == 1
    assert all(one.steps >= 20 * 8 // 20 for one in found)
    assert table_of(found).row_count == 1


def test_the_command_writes_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "talks.jsonl.gz", rows(8))
    out = tmp_path / "out.json"
    with pytest.MonkeyPatch.context() as patch:
        args = ["rules", "--traces", str(tmp_path), "--trace", "talks", "--shape", "gemma3-27b"]
        patch.setattr("sys.argv", [*args, "--size", "4", "--json", str(out)])
        main()
    written = json.loads(out.read_text())["figures"]
    assert [one["rule"] for one in written] == list(RULES)
    assert "gemma3-27b" in capsys.readouterr().out
