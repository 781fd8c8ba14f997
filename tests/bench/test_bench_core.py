"""What the memory core's bench says of its figures."""

from typing import Any

import pytest

from bench.core.bounds import STEP_US, decode_row, over_rounds
from bench.replay.peers import US, quickest


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
