"""A step with copies: its plans, its sides, and what the fit learns from its seconds."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from kvell.calibration.host_copies import (
    ALONE,
    BEFORE,
    MOST_SLOWS,
    NONE,
    PAGES,
    SIDES,
    UNDER,
    CopyRig,
    SideSeconds,
    can_measure,
    fit_slowdown,
    link_of,
    measure_host_copies,
    moved_bytes,
)
from kvell.cost.calibration import HostCopies
from kvell.engine.requests.plan import StepPlan
from kvell.engine.running.copies.copy_order import copy_order
from tests.models.fused_models import fused_model, generic_model
from tests.models.harness import tiny_module

MOVED = 8


class Counting:
    """A clock that advances a second at every reading."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now_seconds(self) -> float:
        self.seconds += 1.0
        return self.seconds


@pytest.fixture(scope="module")
def rig() -> CopyRig:
    return CopyRig(fused_model(tiny_module("LlamaForCausalLM")), 1 << 20, MOVED, Counting())


def plan_of(rig: CopyRig, pages: int = MOVED) -> StepPlan:
    return rig.plan(3, 1, 64, pages)


def seen(rig: CopyRig, plan: StepPlan, *, slows: float, alone: float) -> dict[str, SideSeconds]:
    """What a machine with this ``slows`` would show, around a pass of one second."""
    found = {side: SideSeconds(1.0, 1.0, 1.0) for side in SIDES}
    found[ALONE] = SideSeconds(alone, alone, alone)
    under = link_of(plan, found, rig.layout, on_host=True, slows=slows).step_seconds(plan)
    return found | {UNDER: SideSeconds(under, under, under)}


def test_a_plan_moves_as_many_pages_each_way_half_of_them_over_each_other(rig: CopyRig) -> None:
    plan = plan_of(rig)
    out, back = plan.offloads, plan.fetches
    assert len(out) == len(back) == MOVED
    assert len(set(out[:, 1].tolist()) & set(back[:, 2].tolist())) == MOVED // 2
    assert not set(out[:, 2].tolist()) & set(back[:, 1].tolist())
    assert set(back[:, 2].tolist()) <= set(plan.new_pages[:, 3].tolist())
    order = copy_order(plan, rig.layout.groups, on_host=True)
    assert [len(order.layered_out), len(order.layered_in)] == [MOVED // 2, MOVED]
    assert len(order.last_out) == MOVED // 2


def test_more_pages_than_the_requests_have_are_refused(rig: CopyRig) -> None:
    with pytest.raises(ValueError, match="no 13 pages"):
        plan_of(rig, 13)


def test_sides_differ_in_when_they_copy_and_each_is_timed(rig: CopyRig) -> None:
    plan = plan_of(rig)
    rounds = 3
    (found,) = rig.rounds([plan], rounds)
    assert set(found) == set(SIDES)
    assert found[UNDER] == SideSeconds(1.0, 1.0, 1.0)
    size_bytes = moved_bytes(plan, rig.layout)
    before, under = rig.before.copier.counts, rig.under.copier.counts
    assert (before.before_bytes, before.under_bytes) == ((rounds + 1) * size_bytes, 0)
    assert (under.before_bytes, under.under_bytes) == (0, (rounds + 1) * size_bytes)


def test_both_sides_draw_the_same_tokens(rig: CopyRig) -> None:
    plan = plan_of(rig)
    buffer = rig.mover.held
    buffer.copy_(rig.mover.pool[: buffer.numel()])
    held = buffer.clone()
    results = []
    for runner in (rig.before, rig.under):
        buffer.copy_(held)
        results.append(structs.replace(runner.run(plan), team=None))
    assert results[0] == results[1]
    vocab_size = tiny_module("LlamaForCausalLM").config.vocab_size
    assert np.isin(results[0].token_ids, range(vocab_size)).all()


def test_plans_take_turns_in_every_round(rig: CopyRig, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [plan_of(rig, pages) for pages in (4, MOVED)]
    moved: list[int] = []
    monkeypatch.setattr(rig, "_move", lambda plan: moved.append(len(plan.fetches)))
    few, many = rig.rounds(plans, 2)
    assert moved == [4, MOVED] * 3
    assert set(few) == set(many) == set(SIDES)


@pytest.mark.parametrize("slows", [0.0, 0.37, 1.0, 1.6, MOST_SLOWS])
def test_the_fit_finds_what_copies_cost(rig: CopyRig, slows: float) -> None:
    plan = plan_of(rig)
    measured = [(plan, seen(rig, plan, slows=slows, alone=alone)) for alone in (0.2, 0.5)]
    assert fit_slowdown(measured, rig.layout) == pytest.approx(slows)


def test_the_fit_goes_by_the_middle_round_and_not_by_a_lucky_one(rig: CopyRig) -> None:
    plan = plan_of(rig)
    sides = seen(rig, plan, slows=1.3, alone=0.4)
    lucky = {side: replace(one, best=one.best / 3) for side, one in sides.items()}
    lucky[NONE] = replace(lucky[NONE], best=0.01)
    assert fit_slowdown([(plan, lucky)], rig.layout) == pytest.approx(1.3)


def test_one_step_that_met_a_neighbour_is_outvoted(rig: CopyRig) -> None:
    plan = plan_of(rig)
    measured = [(plan, seen(rig, plan, slows=1.1, alone=alone)) for alone in (0.2, 0.3, 0.4)]
    wrong = seen(rig, plan, slows=0.1, alone=0.5)
    assert fit_slowdown([*measured, (plan, wrong)], rig.layout) == pytest.approx(1.1)


def test_copies_before_a_pass_are_charged_one_after_the_other(rig: CopyRig) -> None:
    plan = plan_of(rig)
    found = seen(rig, plan, slows=0.0, alone=0.25)
    link = link_of(plan, found, rig.layout, on_host=False)
    assert link.step_seconds(plan) == pytest.approx(1.25)
    assert found[BEFORE].middle == 1.0


@pytest.mark.parametrize("under", [True, False])
def test_a_calibration_learns_the_rate_and_what_is_lost(under: bool) -> None:
    """Every side takes one second of this clock: a copy beside a pass costs nothing more."""
    model = fused_model(tiny_module("LlamaForCausalLM"))
    assert can_measure(model)
    found = measure_host_copies(model, Counting(), under_pass=under, rounds=2)
    page_bytes = model.description.layers[0].token_bytes * len(model.description.layers) * 16
    assert found.bytes_per_second == pytest.approx(page_bytes * (PAGES[0] + PAGES[1]))
    assert found.are_under_pass is under
    assert found.slows == 0.0


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "JambaForCausalLM"])
def test_models_of_several_groups_have_no_measured_copies(architecture: str) -> None:
    model = generic_model(tiny_module(architecture))
    assert not can_measure(model)
    assert measure_host_copies(model, Counting(), under_pass=True) == HostCopies()
