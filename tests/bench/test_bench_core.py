"""Verdicts and tables of the memory core's benches."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.core.bounds import STEP_US, decode_row, over_rounds
from bench.replay.peers import AZURE, US, Row, quickest, table_of, vllm_figures


def row(best: float, lengths: float, **others: Any) -> dict[str, Any]:
    step = {"best_us": best, "median_us": 2 * best}
    quiet = {"best_us": best / 2, "median_us": best}
    return (
        {"pool": "1GB", "context": "1K"}
        | others
        | {
            "step": step,
            "quiet": quiet,
            "yardsticks": lengths,
        }
    )


def test_rounds_give_the_best_of_bests_and_medians_of_the_rest() -> None:
    rounds = [row(0.4, 1.0), row(0.1, 9.0), row(0.2, 1.2)]
    merged = over_rounds(rounds)
    assert merged["step"] == {"best_us": 0.1, "median_us": 0.4}
    assert merged["quiet"] == {"best_us": 0.05, "median_us": 0.2}
    assert merged["yardsticks"] == 1.2
    assert (merged["pool"], merged["context"]) == ("1GB", "1K")
    assert rounds[0]["yardsticks"] == 1.0


@pytest.mark.parametrize(
    ("best", "lengths", "is_kept"),
    [
        (0.05, 1.6, False),
        (0.08, 1.45, True),
        (0.08, 1.6, False),
        (1.1 * STEP_US, 1.0, False),
    ],
)
def test_a_decode_row_is_kept_if_it_is_cheap_and_flat(
    best: float, lengths: float, *, is_kept: bool
) -> None:
    found = decode_row("shape", 64, [row(0.05, 1.0), row(best, lengths, pool="1TB")])
    assert found["bound kept"] is is_kept
    assert found["pools"] == "1GB-1TB"
    assert found["flat within %"] == pytest.approx(100 * (lengths - 1) / (lengths + 1))


def test_a_trace_keeps_its_quickest_round_and_the_median() -> None:
    rounds = [{"kvell": {US: us, "steps": 7}} for us in (0.9, 0.3, 0.4)]
    assert quickest(rounds) == {"kvell": {US: 0.3, "steps": 7}, "median_us": 0.4}
    refused = [{"refused": "too large"}] * 3
    assert quickest(refused) == {"refused": "too large"}


OURS = {"batch_mean": 2.0, "hit_rate": 0.5, "waste": 0.01, "stranded": 0.0, US: 0.25}
RESULT = {"shape": "llama3-8b", "trace": AZURE, "memory_gib": 16, "median_us": 0.3}


def test_vllms_figures_are_those_that_its_bench_wrote(tmp_path: Path) -> None:
    file, runs = tmp_path / "managers_peers.json", [OURS | {US: us} for us in (30.0, 20.0)]
    peers = {"shape": "llama3-8b", "trace": AZURE, "memory_gib": 16}
    refused = peers | {"shape": "qwen3-next", "theirs": {"decodes-first": [{"refused": "no"}]}}
    file.write_text(json.dumps({"rows": [peers | {"theirs": {"decodes-first": runs}}, refused]}))
    found = vllm_figures(file)
    assert found == {
        Row("llama3-8b", AZURE, 16): {"batch_mean": 2.0, "hit_rate": 0.5, "waste": 0.01, US: 20.0}
    }
    assert vllm_figures(tmp_path / "none.json") == {}


def test_a_row_without_a_peer_is_shown_alone() -> None:
    result: dict[str, Any] = RESULT | {"kvell": OURS | {"preemptions": 3}}
    alone = table_of([result], {})
    assert list(alone.columns[3].cells) == ["2.0 / –"]
    beside = table_of([result], {Row("llama3-8b", AZURE, 16): {"batch_mean": 1.5}})
    assert list(beside.columns[3].cells) == ["2.0 / 1.5"]
