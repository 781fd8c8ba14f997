"""Pages that a plan moves to host memory and back take their time."""

import numpy as np
import pytest

from kvell.engine.requests.plan import StepPlan
from kvell.simulator.replay.host_link import WithHostLink
from kvell.vocabulary import StepNumber
from tests.engine.conftest import make_layout


class TwoSeconds:
    request_seconds = 0.25

    def step_seconds(self, plan: StepPlan) -> float:
        return 2.0


def test_a_step_waits_for_what_it_moves() -> None:
    layout = make_layout((0, 9))
    machine = WithHostLink(TwoSeconds(), layout, 1000.0)
    assert machine.request_seconds == 0.25
    assert machine.step_seconds(StepPlan(StepNumber(1))) == 2.0
    full, sliding = (group.page_stride_bytes for group in layout.groups)
    plan = StepPlan(
        StepNumber(1),
        offloads=np.array([[0, 1, 2], [1, 5, 0]], np.int32),
        fetches=np.array([[1, 3, 4]], np.int32),
    )
    moved_bytes = full + 2 * sliding
    assert machine.step_seconds(plan) == pytest.approx(2.0 + moved_bytes / 1000)


@pytest.mark.parametrize(("bytes_per_second", "copied"), [(1e6, "hidden"), (1.0, "seen")])
def test_layers_move_while_others_are_computed(bytes_per_second: float, copied: str) -> None:
    layout = make_layout((0, 9))
    machine = WithHostLink(TwoSeconds(), layout, bytes_per_second, streamed_layers=4)
    assert machine.step_seconds(StepPlan(StepNumber(1))) == 2.0
    plan = StepPlan(
        StepNumber(1),
        offloads=np.array([[0, 1, 2], [1, 5, 0]], np.int32),
        fetches=np.array([[1, 3, 4]], np.int32),
    )
    full, sliding = (group.page_stride_bytes for group in layout.groups)
    moving = (full + sliding) / bytes_per_second  # out and in at once
    longer = 2.0 if copied == "hidden" else moving
    assert machine.step_seconds(plan) == pytest.approx(longer + moving / 4)
