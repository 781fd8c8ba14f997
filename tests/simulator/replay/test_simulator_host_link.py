"""Pages that a plan moves to host memory and back take their time, as the runner moves them."""

from dataclasses import replace

import numpy as np
import pytest

from kvell.engine.requests.plan import PageCopy, StepPlan, TokenWork
from kvell.engine.running.copy_order import copy_order
from kvell.engine.running.copy_stages import stages_of
from kvell.simulator.replay.host_link import WithHostLink
from kvell.vocabulary import RequestId, StepNumber
from tests.engine.conftest import make_layout

LAYOUT = make_layout((0, 9))
FULL, SLIDING = (group.page_stride_bytes for group in LAYOUT.groups)
WORK = TokenWork(RequestId("a"), 0, 0, 1, np.zeros(1, np.int32), None, 0)
PLAN = StepPlan(
    StepNumber(1),
    offloads=np.array([[0, 1, 2], [1, 5, 0]], np.int32),
    fetches=np.array([[1, 3, 4]], np.int32),
    work=(WORK,),
)
RATE = 1000.0


class TwoSeconds:
    request_seconds = 0.25

    def step_seconds(self, plan: StepPlan) -> float:
        return 2.0


def link(
    *, rate: float = RATE, on_host: bool = True, slows: float = 0.0, streamed_layers: int = 0
) -> WithHostLink:
    return WithHostLink(TwoSeconds(), LAYOUT, rate, on_host, slows, streamed_layers)


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
    plan = replace(PLAN, offloads=PLAN.offloads[:0], copies=(PageCopy(1, 4, 9),))
    assert link().step_seconds(plan) == pytest.approx(2.0 + SLIDING / RATE)


def test_copies_that_slow_the_pass_as_long_as_they_take_gain_nothing() -> None:
    rate = 1e6
    before, under = link(rate=rate, on_host=False), link(rate=rate, slows=1.0)
    assert under.step_seconds(PLAN) == pytest.approx(before.step_seconds(PLAN))
    assert link(rate=rate, slows=0.5).step_seconds(PLAN) < before.step_seconds(PLAN)


@pytest.mark.parametrize(("rate", "copied"), [(1e6, "hidden"), (1.0, "seen")])
def test_layers_of_the_paper_move_while_others_are_computed(rate: float, copied: str) -> None:
    moving = (FULL + SLIDING) / rate  # out and in at once
    longer = 2.0 if copied == "hidden" else moving
    machine = link(rate=rate, streamed_layers=4)
    assert machine.step_seconds(PLAN) == pytest.approx(longer + moving / 4)
    assert machine.step_seconds(StepPlan(StepNumber(1))) == 2.0
