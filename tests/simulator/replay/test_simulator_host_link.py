"""Pages that a plan moves to host memory and back take their time, as the runner moves them."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cost.calibration import HostCopies
from kvell.engine.requests.plan import PageCopy, StepPlan
from kvell.engine.running.copies.copy_order import copy_order
from kvell.pages.stages import stages_of
from kvell.simulator.replay.host_link import WithHostLink, calibrated_link
from kvell.simulator.replay.runner import CalibratedMachine
from kvell.vocabulary import PageId, StepNumber
from tests.cost.made import MADE
from tests.engine.conftest import make_layout
from tests.engine.works import work_of

LAYOUT = make_layout((0, 9))
FULL, SLIDING = (group.page_stride_bytes for group in LAYOUT.groups)
WORK = work_of("a", 0, 0, 1)
PLAN = StepPlan(
    StepNumber(1),
    offloads=np.array([[0, 1, 2], [1, 5, 0]], np.int32),
    fetches=np.array([[1, 3, 4]], np.int32),
    work=(WORK,),
)
RATE = 1000.0


@dataclass(frozen=True)
class Takes:
    """A machine whose steps all take the same."""

    seconds: float
    request_seconds: float = 0.25

    def step_seconds(self, plan: StepPlan) -> float:
        return self.seconds


def link(
    *, rate: float = RATE, on_host: bool = True, slows: float = 0.0, streamed_layers: int = 0
) -> WithHostLink:
    return WithHostLink(Takes(2.0), LAYOUT, rate, on_host, slows, streamed_layers)


@pytest.mark.parametrize("on_host", [True, False])
def test_a_step_that_moves_nothing_takes_what_the_machine_says(on_host: bool) -> None:
    machine = link(on_host=on_host, slows=1.0)
    assert machine.request_seconds == 0.25
    assert machine.step_seconds(StepPlan(StepNumber(1), work=(WORK,))) == 2.0


def test_on_a_gpu_a_step_waits_for_all_that_it_moves() -> None:
    seconds = (FULL + 2 * SLIDING) / RATE
    assert link(on_host=False).step_seconds(PLAN) == pytest.approx(2.0 + seconds)


def test_so_does_a_step_that_computes_nothing() -> None:
    seconds = (FULL + 2 * SLIDING) / RATE
    assert link().step_seconds(replace(PLAN, work=())) == pytest.approx(2.0 + seconds)


@pytest.mark.parametrize("slows", [0.0, 0.25, 1.0])
def test_pages_that_nobody_waits_for_slow_the_pass(slows: float) -> None:
    plan = replace(PLAN, fetches=PLAN.fetches[:0])
    assert len(copy_order(plan, LAYOUT.groups, on_host=True).last_out) == 2
    beside = (FULL + SLIDING) / RATE
    assert link(slows=slows).step_seconds(plan) == pytest.approx(
        max(2.0 + slows * beside, beside + slows * 2.0)
    )


@pytest.mark.parametrize("slows", [0.0, 0.5])
def test_the_first_stage_of_what_comes_in_is_waited_for(slows: float) -> None:
    rate = 1e6
    plan = replace(PLAN, offloads=PLAN.offloads[:0])
    stages = len(stages_of(LAYOUT.groups))
    assert stages > 1
    moved = SLIDING / rate
    expected = 2.0 + moved / stages + slows * moved * (1 - 1 / stages)
    assert link(rate=rate, slows=slows).step_seconds(plan) == pytest.approx(expected)


def test_copies_that_take_longer_than_the_pass_are_the_step() -> None:
    plan = replace(PLAN, offloads=PLAN.offloads[:0])
    assert link(rate=1.0).step_seconds(plan) == pytest.approx(SLIDING)


def test_what_is_copied_on_is_fetched_before_the_pass() -> None:
    """The replay asks what the runner asks: nothing of this overlaps."""
    plan = replace(PLAN, offloads=PLAN.offloads[:0], copies=(PageCopy(1, PageId(4), PageId(9)),))
    assert link().step_seconds(plan) == pytest.approx(2.0 + SLIDING / RATE)


def test_copies_that_slow_the_pass_as_long_as_they_take_gain_nothing() -> None:
    rate = 1e6
    before, under = link(rate=rate, on_host=False), link(rate=rate, slows=1.0)
    assert under.step_seconds(PLAN) == pytest.approx(before.step_seconds(PLAN))
    assert link(rate=rate, slows=0.5).step_seconds(PLAN) < before.step_seconds(PLAN)


MOST_SLOWS = 3.0
slowness = st.floats(0.0, MOST_SLOWS)
rates = st.floats(1.0, 1e6)


def test_copies_under_a_pass_may_cost_more_than_before_it() -> None:
    """Milliseconds of a step of 8 requests, 90 MiB moved: measured were 39.1 under its pass."""
    machine = WithHostLink(Takes(15.6), LAYOUT, 1.0, on_host=True, slows=1.6)
    plan = replace(PLAN, offloads=PLAN.offloads[:0])
    alone = SLIDING / machine.bytes_per_second
    machine = replace(machine, bytes_per_second=alone / 15.2)
    stages = len(stages_of(LAYOUT.groups))
    waited = 15.2 / stages
    assert machine.step_seconds(plan) == pytest.approx(15.6 + 1.6 * (15.2 - waited) + waited)


@given(rates, slowness, slowness)
def test_slower_copies_never_make_a_step_shorter(rate: float, first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert link(rate=rate, slows=low).step_seconds(PLAN) <= link(
        rate=rate, slows=high
    ).step_seconds(PLAN) * (1 + 1e-12)


@given(rates, st.floats(0, 1e-6))
def test_nothing_jumps_where_nothing_is_gained(rate: float, little: float) -> None:
    """At 1 a step takes what it takes with all copies before its pass, and little else near it."""
    before = link(rate=rate, on_host=False).step_seconds(PLAN)
    for slows in (1.0 - little, 1.0, 1.0 + little):
        under = link(rate=rate, slows=slows).step_seconds(PLAN)
        assert under == pytest.approx(before, rel=2e-6)


@given(rates, slowness)
def test_a_gain_is_a_gain_and_a_loss_is_one_over_copies_before_the_pass(
    rate: float, slows: float
) -> None:
    before = link(rate=rate, on_host=False).step_seconds(PLAN)
    under = link(rate=rate, slows=slows).step_seconds(PLAN)
    assert (under - before) * (slows - 1) >= -1e-9 * before
    machine = link(rate=rate, slows=0.0).step_seconds(PLAN)
    assert under >= machine


@pytest.mark.parametrize(("under", "expected"), [(True, 0.5), (False, 1.0)])
def test_a_calibration_says_what_copies_cost_and_when_they_are_made(
    under: bool, expected: float
) -> None:
    made = replace(MADE, copy_bytes_per_second=5.0, copies=HostCopies(2.0, under, 0.5))
    found = calibrated_link(CalibratedMachine(made), LAYOUT)
    assert (found.bytes_per_second, found.on_host, found.slows) == (2.0, under, 0.5)
    plan = replace(PLAN, fetches=PLAN.fetches[:0])
    computing, moved = found.machine.step_seconds(plan), (FULL + SLIDING) / 2.0
    assert found.step_seconds(plan) == pytest.approx(moved + expected * computing)


def test_a_calibration_without_copies_of_pages_gives_the_rate_of_a_plain_copy() -> None:
    found = calibrated_link(CalibratedMachine(replace(MADE, copy_bytes_per_second=5.0)), LAYOUT)
    assert (found.bytes_per_second, found.on_host) == (5.0, False)


@pytest.mark.parametrize(("rate", "copied"), [(1e6, "hidden"), (1.0, "seen")])
def test_layers_of_the_paper_move_while_others_are_computed(rate: float, copied: str) -> None:
    moving = (FULL + SLIDING) / rate  # out and in at once
    longer = 2.0 if copied == "hidden" else moving
    machine = link(rate=rate, streamed_layers=4)
    assert machine.step_seconds(PLAN) == pytest.approx(longer + moving / 4)
    assert machine.step_seconds(StepPlan(StepNumber(1))) == 2.0
