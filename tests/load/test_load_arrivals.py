"""When requests are sent, and who leaves early."""

from itertools import pairwise

import numpy as np
import pytest

from kvell.load.arrivals import hang_ups, retime, think_times
from tests.load.loads import row


class TestTimes:
    def test_a_trace_keeps_its_own_from_zero(self) -> None:
        rows = retime([row(5.0), row(5.5), row(9.0)], rate=None)
        assert [one.arrival_s for one in rows] == [0.0, 0.5, 4.0]

    def test_a_scale_makes_them_longer(self) -> None:
        rows = retime([row(5.0), row(5.5), row(9.0)], rate=None, time_scale=2.5)
        assert [one.arrival_s for one in rows] == [0.0, 1.25, 10.0]

    def test_all_at_once(self) -> None:
        assert {one.arrival_s for one in retime([row(1.0), row(2.0)], rate=float("inf"))} == {0.0}

    @pytest.mark.parametrize("rate", [0.5, 40.0])
    def test_a_poisson_process(self, rate: float) -> None:
        rows = retime([row()] * 20_000, rate=rate, seed=3)
        gaps = np.diff([one.arrival_s for one in rows]) * rate
        assert rows[0].arrival_s == 0.0
        assert gaps.mean() == pytest.approx(1.0, rel=0.03)
        assert gaps.std() == pytest.approx(1.0, rel=0.03)
        assert np.median(gaps) == pytest.approx(np.log(2), rel=0.03)

    def test_only_times_change(self) -> None:
        rows = [row(1.0, prompt=9), row(2.0, prompt=8, session="s")]
        found = retime(rows, rate=1.0)
        assert [(one.prompt_tokens, one.session) for one in found] == [(9, None), (8, "s")]
        assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(found))

    def test_the_seed_decides(self) -> None:
        def times(seed: int) -> list[float]:
            return [one.arrival_s for one in retime([row()] * 9, rate=1.0, seed=seed)]

        assert times(1) == times(1) != times(2)


def test_thinking_is_exponential() -> None:
    found = np.asarray(think_times(20_000, 4.0, seed=1))
    assert found.mean() == pytest.approx(4.0, rel=0.03)
    assert found.std() == pytest.approx(4.0, rel=0.03)
    assert think_times(5, 0.0) == [0.0] * 5


class TestHangUps:
    def test_nobody_and_everybody(self) -> None:
        rows = [row(output=9)] * 50
        assert hang_ups(rows, 0.0) == [None] * 50
        everybody = hang_ups(rows, 1.0)
        assert {pieces is not None and 1 <= pieces < 9 for pieces in everybody} == {True}
        assert len(set(everybody)) > 4

    def test_a_share(self) -> None:
        found = hang_ups([row(output=100)] * 5_000, 0.2, seed=2)
        assert sum(pieces is not None for pieces in found) == pytest.approx(1_000, rel=0.1)
        assert found == hang_ups([row(output=100)] * 5_000, 0.2, seed=2)

    def test_more_of_them_are_the_same_and_others(self) -> None:
        rows = [row(output=100)] * 500
        few, many = hang_ups(rows, 0.1, seed=2), hang_ups(rows, 0.5, seed=2)
        assert all(more == pieces for pieces, more in zip(few, many, strict=True) if pieces)
