"""The history of a server: three minutes, a bounded number of samples, right rates and medians."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.front.routes import RequestTransfer, TransferTotals
from kvell.server.map.history import (
    HISTORY_SECONDS,
    MOST_SAMPLES,
    RATE_SECONDS,
    HistoryRow,
    HistorySample,
    MapHistory,
)


def row(at_seconds: float, prompt_tokens: int = 0, output_tokens: int = 0) -> HistoryRow:
    return HistoryRow(at_seconds, prompt_tokens, output_tokens, 0, 0, {})


def sampled(*times: float) -> MapHistory:
    history = MapHistory()
    for at_seconds in times:
        history.add(HistorySample(row(at_seconds)))
    return history


def kept(history: MapHistory) -> list[float]:
    return [each.at_seconds for each in history.rows_after(0.0)]


def test_a_sample_is_taken_once_a_second() -> None:
    history = sampled(10.0, 10.5, 10.94, 10.96, 11.9, 12.0)
    assert kept(history) == [10.0, 10.96, 12.0]
    assert not history.takes_sample(12.5) and history.takes_sample(13.0)


def test_samples_older_than_three_minutes_are_dropped() -> None:
    history = sampled(*(float(second) for second in range(1, 400)))
    assert kept(history)[0] == 399 - HISTORY_SECONDS and kept(history)[-1] == 399
    assert len(history) == MOST_SAMPLES
    history.add(HistorySample(row(1000.0)))
    assert kept(history) == [1000.0], "the process was stopped meanwhile"


@given(st.lists(st.floats(0.0, 100.0), max_size=300))
def test_the_number_of_samples_is_bounded_at_any_pace(steps: list[float]) -> None:
    history, now = MapHistory(), 0.0
    for step in steps:
        now += step
        history.add(HistorySample(row(now)))
        assert len(history) <= MOST_SAMPLES
        oldest = history.oldest
        assert oldest is not None and now - oldest.row.at_seconds <= HISTORY_SECONDS + 1


def test_a_viewer_gets_the_rows_that_are_new_to_it() -> None:
    history = sampled(1.0, 2.0, 3.0)
    assert [each.at_seconds for each in history.rows_after(1.0)] == [2.0, 3.0]
    assert history.rows_after(3.0) == []


def test_rates_are_those_of_the_last_seconds() -> None:
    history = MapHistory()
    assert history.rates() == (None, None)
    for second in range(30):
        busy = max(0, second - 20)
        history.add(HistorySample(row(float(second), 100 * busy, 7 * busy)))
    # From 19 s to 29 s, of which the last 9 s were busy.
    assert history.rates() == pytest.approx((100 * 9 / RATE_SECONDS, 7 * 9 / RATE_SECONDS))


def test_rates_after_a_pause_are_those_of_the_pause() -> None:
    history = MapHistory()
    for at_seconds, tokens in ((0.0, 0), (100.0, 500)):
        history.add(HistorySample(row(at_seconds, tokens, tokens)))
    assert history.rates() == (5.0, 5.0)


def test_medians_are_those_of_all_samples() -> None:
    history = sampled(0.0)
    assert history.medians() == (None, None)
    history.add(HistorySample(row(1.0), first_tokens=(1.0, 9.0)))
    history.add(HistorySample(row(2.0), first_tokens=(2.0,), next_tokens=(0.5, 0.25)))
    assert history.medians() == (2.0, 0.375)
    history.add(HistorySample(row(HISTORY_SECONDS + 2.0), next_tokens=()))
    assert history.medians() == (2.0, 0.375)
    history.add(HistorySample(row(HISTORY_SECONDS + 3.5)))
    assert history.medians() == (None, None), "all tokens are older than three minutes"


def test_rungs_and_transfers_of_the_beginning_are_kept() -> None:
    history = MapHistory()
    assert history.rungs_before("a") == {}
    moves = {RequestTransfer("move", "a", "b"): TransferTotals(3)}
    history.add(HistorySample(row(1.0), transfers=moves))
    history.add(HistorySample(row(2.0), rungs={"a": {"evict": 5}}))
    history.add(HistorySample(row(3.0), rungs={"a": {"evict": 9}}))
    oldest = history.oldest
    assert oldest is not None and oldest.transfers == moves
    assert history.rungs_before("a") == {"evict": 5} and history.rungs_before("b") == {}
