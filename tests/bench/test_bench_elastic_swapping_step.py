"""The bench of a step that swaps: its plans, and what the replay learns from its seconds."""

import numpy as np
import pytest

from bench.elastic.swapping_step import (
    ALONE,
    BEFORE,
    NONE,
    SIDES,
    UNDER,
    Rig,
    Row,
    Seen,
    fitted,
    line,
    link_of,
    moved_bytes,
)
from bench.engine.forward import Shape
from kvell.engine.requests.plan import StepPlan
from kvell.engine.running.copy_order import copy_order
from tests.models.fused_models import fused_model
from tests.models.harness import tiny_module

SHAPE = Shape(3, 1, 64)
PAGES = 8


class Counting:
    """A clock that advances a second at every reading."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now_seconds(self) -> float:
        self.seconds += 1.0
        return self.seconds


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(fused_model(tiny_module("LlamaForCausalLM")), 1, PAGES, Counting())


def seen(rig: Rig, plan: StepPlan, *, slows: float, alone: float) -> dict[str, Seen]:
    """What a machine with this ``slows`` would show, around a pass of one second."""
    found = {side: Seen(1.0, 1.0, 1.0) for side in SIDES}
    found[ALONE] = Seen(alone, alone, alone)
    under = link_of(plan, found, rig.layout, on_host=True, slows=slows).step_seconds(plan)
    return found | {UNDER: Seen(under, under, under)}


def test_a_plan_moves_as_many_pages_each_way_half_of_them_over_each_other(rig: Rig) -> None:
    plan = rig.plan(SHAPE, PAGES)
    out, back = plan.offloads, plan.fetches
    assert len(out) == len(back) == PAGES
    assert len(set(out[:, 1].tolist()) & set(back[:, 2].tolist())) == PAGES // 2
    assert not set(out[:, 2].tolist()) & set(back[:, 1].tolist())
    assert set(back[:, 2].tolist()) <= set(plan.new_pages[:, 3].tolist())
    order = copy_order(plan, rig.layout.groups, on_host=True)
    assert [len(order.layered_out), len(order.layered_in)] == [PAGES // 2, PAGES]
    assert len(order.last_out) == PAGES // 2


def test_more_pages_than_the_requests_have_are_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="no 13 pages"):
        rig.plan(SHAPE, 13)


def test_sides_differ_in_when_they_copy_and_each_is_timed(rig: Rig) -> None:
    plan = rig.plan(SHAPE, PAGES)
    rounds = 3
    found = rig.rounds(plan, rounds)
    assert set(found) == set(SIDES)
    assert found[UNDER] == Seen(1.0, 1.0, 1.0)
    size_bytes = moved_bytes(plan, rig.layout)
    before, under = rig._before.copier.counts, rig._under.copier.counts
    assert (before.before_bytes, before.under_bytes) == ((rounds + 1) * size_bytes, 0)
    assert (under.before_bytes, under.under_bytes) == (0, (rounds + 1) * size_bytes)


def test_both_sides_draw_the_same_tokens(rig: Rig) -> None:
    plan = rig.plan(SHAPE, PAGES)
    rig._mover._held.copy_(rig._mover._pool[: rig._mover._held.numel()])
    held = rig._mover._held.clone()
    results = []
    for runner in (rig._before, rig._under):
        rig._mover._held.copy_(held)
        results.append(runner.run(plan))
    assert results[0] == results[1]
    assert np.isin(results[0].token_ids, range(rig._vocab)).all()


@pytest.mark.parametrize("slows", [0.0, 0.37, 1.0])
def test_the_fit_finds_what_copies_cost(rig: Rig, slows: float) -> None:
    plan = rig.plan(SHAPE, PAGES)
    measured = [(plan, seen(rig, plan, slows=slows, alone=alone)) for alone in (0.2, 0.5)]
    assert fitted(measured, rig.layout) == pytest.approx(slows)


def test_a_row_tells_how_far_the_replay_is(rig: Rig) -> None:
    plan = rig.plan(SHAPE, PAGES)
    told = seen(rig, plan, slows=0.5, alone=0.5) | {BEFORE: Seen(1.25, 1.3, 2.0)}
    before = link_of(plan, told, rig.layout, on_host=False).step_seconds(plan)
    row = Row("3x1x64", PAGES, 1.0, told, {BEFORE: before, UNDER: told[UNDER].best})
    assert row.error(BEFORE) == pytest.approx(1.5 / 1.25 - 1)
    assert row.error(UNDER) == pytest.approx(0.0)
    assert NONE in line(row)
    assert "+20 %" in line(row)
