"""Equations 5 to 7, with the prices of a calibration."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from kvell.cluster.steering.lending.model import SLOWDOWN, PerformanceModel, ThroughputInputs
from kvell.cost.amounts import shape_of
from kvell.cost.analytic import AnalyticModel, ModelCost
from kvell.cost.model import attended_tokens_per_second, batch_seconds
from kvell.cost.prices import BATCHES, ExecCosts, prices_of
from kvell.memory import GroupKind, LayerSpec
from kvell.simulator.hardware.profiles import load_profile
from tests.cluster.steering.lending.loads import BLOCK, COSTS, COVERED, SECTION, loads, models

BLOCKS = np.arange(120, dtype=np.float64)
TOKENS, BYTES = BLOCKS * SECTION, BLOCKS * BLOCK
LONG = ThroughputInputs(
    1,
    90_000,
    90 * BLOCK,
    6,
    1_000.0,
    2.0 * BLOCK,
    waiting_tokens=1_000.0,
    waiting_bytes=2.0 * BLOCK,
)
"""One long request fills the memory, and six short ones wait."""
BUSY = ThroughputInputs(20, 20_000, 2.0 * BLOCK, spare_bytes=60 * BLOCK)


@given(models, loads)
def test_a_batch_never_falls_with_memory_and_never_rises_beyond_who_waits(
    model: PerformanceModel, load: ThroughputInputs
) -> None:
    batches = model.batch_with(load, BYTES)
    assert (np.diff(batches) >= 0).all()
    assert batches.min() >= 0 and batches.max() <= load.batch + load.waiting
    assert (batches == np.round(batches)).all()


@given(models, loads)
def test_a_creditor_never_gets_faster_with_what_it_lends(
    model: PerformanceModel, load: ThroughputInputs
) -> None:
    load = replace(load, waiting=0)
    throughput = model.creditor(load, TOKENS, BYTES)
    assert (np.diff(throughput) <= 1e-9 * throughput[:-1]).all() or _gives_way(model, load)


def _gives_way(model: PerformanceModel, load: ThroughputInputs) -> bool:
    """A long request that gives way may leave the others faster than both were."""
    return bool(np.diff(model.batch_with(load, -BYTES)).any())


@given(models, loads)
def test_with_nothing_moved_both_sides_are_what_equation_5_says(
    model: PerformanceModel, load: ThroughputInputs
) -> None:
    load = replace(load, away_tokens=0, asked_tokens=0, lent_tokens=0, waiting=0, spare_bytes=0)
    none = np.zeros(1)
    assert model.borrowing(load, none, none)[0] == model.creditor(load, none, none)


@given(loads)
def test_what_creditors_compute_in_time_makes_a_debtor_faster(load: ThroughputInputs) -> None:
    """The paper's equation 6: its step loses K/g."""
    throughput = PerformanceModel(COVERED).borrowing(load, TOKENS, np.zeros(len(TOKENS)))[0]
    assert (np.diff(throughput) >= -1e-9).all()


def test_what_is_read_in_the_same_memory_makes_no_step_longer_or_shorter() -> None:
    alone = replace(LONG, waiting=0)
    throughput = PerformanceModel(COSTS).borrowing(alone, TOKENS, BYTES)[0]
    assert throughput == pytest.approx(throughput[0])


def test_all_gain_until_the_creditors_own_requests_give_way() -> None:
    """Figure 7: the sum rises while requests are let in, and falls behind the surplus."""
    model = PerformanceModel(COSTS)
    together = model.borrowing(LONG, TOKENS, BYTES)[0] + model.creditor(BUSY, TOKENS, BYTES)
    best = int(together.argmax())
    assert best == 12, "six times two sections"
    behind = together[61:]
    assert together[60] > behind[0] and (np.diff(behind) <= 1e-9).all()


@given(models, loads)
def test_less_is_covered_the_more_is_elsewhere(
    model: PerformanceModel, load: ThroughputInputs
) -> None:
    covered = model.borrowing(replace(load, waiting=0), TOKENS, np.zeros(len(TOKENS)))[1]
    assert (np.diff(covered.astype(int)) <= 0).all()


def test_prices_are_those_of_the_calibrated_model() -> None:
    layers = [LayerSpec(i, GroupKind.FULL, 32, 128, 2, 0) for i in range(32)]
    cost = ModelCost(6_500_000_000, 13_000_000_000, 4096)
    timed = AnalyticModel(load_profile("a100-80"), cost)
    costs = prices_of(
        timed, shape_of(layers), fetch_bytes_per_second=3e11, swap_bytes_per_second=2e10
    )
    assert costs.natn_seconds == tuple(batch_seconds(timed, batch) for batch in BATCHES)
    assert costs.away_token_seconds == costs.held_token_seconds
    assert attended_tokens_per_second(timed) > 0
    small = PerformanceModel(costs).small_batch
    assert costs.batch_seconds(small) <= SLOWDOWN * costs.batch_seconds(1)
    assert costs.batch_seconds(2 * small) > SLOWDOWN * costs.batch_seconds(1)
    far = prices_of(
        timed,
        shape_of(layers),
        fetch_bytes_per_second=3e11,
        swap_bytes_per_second=2e10,
        away_bytes_per_second=1e11,
    )
    assert far.away_token_seconds == pytest.approx(32 * 2 * 32 * 128 * 2 / 1e11)


def test_without_a_calibration_steps_lie_on_a_line_through_the_usual_prices() -> None:
    seconds = [ExecCosts().batch_seconds(batch) for batch in BATCHES]
    each = np.diff(seconds) / np.diff(BATCHES)
    assert each == pytest.approx(each[0]) and each[0] > 0
