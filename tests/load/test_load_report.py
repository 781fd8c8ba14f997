"""Figures from outcomes, each computed by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.load.outcome import Outcome
from kvell.load.report import Objectives, most_open, open_over_time, spread, summary


def outcome(
    sent: float, *tokens: float, output: int | None = None, failure: str | None = None
) -> Outcome:
    count = len(tokens) if output is None else output
    return Outcome(0, sent, sent, tokens[-1], tokens, 10, count, None, failure)


def test_the_figures_of_an_outcome() -> None:
    found = Outcome(0, 1.0, 1.25, 5.0, (2.0, 2.5, 4.5), output_tokens=6)
    assert found.lag_seconds == 0.25
    assert found.ttft_seconds == 0.75
    assert found.tpot_seconds == 2.5 / 5
    assert found.e2e_seconds == 3.75
    assert found.inter_token_seconds == [0.5, 2.0]


def test_mean_and_percentiles() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0]) == pytest.approx(
        {"mean": 2.5, "p50": 2.5, "p90": 3.7, "p99": 3.97}
    )
    assert spread([7.0]) == {"mean": 7.0, "p50": 7.0, "p90": 7.0, "p99": 7.0}
    assert spread([]) == {"mean": None, "p50": None, "p90": None, "p99": None}


class TestGoodput:
    RUN = (
        outcome(0.0, 0.5, 1.0, 1.5),  # 0.5 s, then 0.5 s a token
        outcome(0.0, 2.0, 2.1, 2.2),  # 2.0 s, then 0.1 s
        outcome(0.0, 0.5, 0.6, 4.0),  # 0.5 s, then 1.75 s
        outcome(0.0, 0.5),  # a single token
        outcome(0.0, 0.1, 0.2, failure="HTTP 500"),
    )

    @pytest.mark.parametrize(
        ("ttft", "tpot", "good"),
        [(None, None, 4), (0.5, None, 3), (None, 0.5, 3), (0.5, 0.5, 2), (0.4, 0.5, 0)],
    )
    def test_both_objectives(self, ttft: float | None, tpot: float | None, good: int) -> None:
        found = summary(self.RUN, Objectives(ttft, tpot))
        assert found["goodput"] == pytest.approx(good / 4.0)
        assert found["slo_attainment"] == pytest.approx(good / 5)
        assert found["request_rate"] == pytest.approx(1.0)
        assert (found["slo_ttft_seconds"], found["slo_tpot_seconds"]) == (ttft, tpot)

    def test_failures_count_in_nothing_else(self) -> None:
        found = summary(self.RUN, Objectives())
        assert (found["completed"], found["failed"]) == (4, 1)
        assert found["output_tokens"] == 10
        assert found["output_tokens_per_second"] == pytest.approx(2.5)
        assert found["prompt_tokens"] == 40
        assert found["ttft_seconds"]["mean"] == pytest.approx(3.5 / 4)
        assert found["tpot_seconds"]["p50"] == pytest.approx(0.5)
        assert found["e2e_seconds"]["p99"] == pytest.approx(4.0, rel=0.02)


def test_names_of_the_contract() -> None:
    found = json.loads(json.dumps(summary([outcome(0.0, 1.0, 2.0)], Objectives())))
    for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
        assert list(found[name]) == ["mean", "p50", "p90", "p99"]
    assert found.keys() >= {
        *("completed", "failed", "request_rate", "output_tokens_per_second", "goodput")
    }


def test_a_run_without_an_answer() -> None:
    found = summary([Outcome(0, 0.0, 0.0, 0.0, failure="no connection")], Objectives())
    assert found["completed"] == found["request_rate"] == found["goodput"] == 0
    assert found["slo_attainment"] == 0.0
    assert found["ttft_seconds"]["mean"] is None
    assert found["failures"] == {"no connection": 1}
    assert summary([], Objectives())["duration_seconds"] == 0.0


def test_what_is_open() -> None:
    run = [outcome(0.0, 5.0), outcome(1.0, 2.0), outcome(2.0, 6.0)]
    assert open_over_time(run) == [(0.0, 1), (1.0, 2), (2.0, 1), (2.0, 2), (5.0, 1), (6.0, 0)]
    assert most_open(run) == 2


@given(st.lists(st.tuples(st.floats(0, 99), st.floats(0.01, 9)), min_size=1, max_size=30))
def test_what_is_opened_is_closed(spans: list[tuple[float, float]]) -> None:
    run = [outcome(sent, sent + lasts) for sent, lasts in spans]
    steps = open_over_time(run)
    assert steps[-1][1] == 0
    assert min(count for _, count in steps) >= 0
    assert 1 <= most_open(run) <= len(run)
