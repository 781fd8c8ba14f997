"""The bench of a step that swaps: its rows, and what they say of the replay."""

import json
from pathlib import Path

import pytest

from bench.elastic import swapping_step
from bench.elastic.swapping_step import Row, line, plan_of
from bench.engine.forward import Shape
from kvell.calibration.host_copies import BEFORE, NONE, SIDES, UNDER, CopyRig, SideSeconds
from kvell.clock import VirtualClock
from tests.models.fused_models import fused_model
from tests.models.harness import tiny_module

SECONDS = {side: SideSeconds(0.5, 1.0, 2.0) for side in SIDES}


def test_a_plan_has_the_shape_that_is_asked_for() -> None:
    rig = CopyRig(fused_model(tiny_module("LlamaForCausalLM")), 1 << 20, 8, VirtualClock())
    plan = plan_of(rig, Shape(3, 2, 64), 8)
    assert [(work.start, work.count) for work in plan.work] == [(62, 2)] * 3
    assert len(plan.offloads) == len(plan.fetches) == 8


def test_a_row_tells_how_far_the_replay_is_from_the_middle_round() -> None:
    row = Row("3x1x64", 8, 1.0, SECONDS, {BEFORE: 1.2, UNDER: 0.9})
    assert row.error(BEFORE) == pytest.approx(0.2)
    assert row.error(UNDER) == pytest.approx(-0.1)
    assert NONE in line(row)
    assert "+20 %" in line(row) and "1000.0 (500.0 to 2000.0)" in line(row)


def test_a_row_tells_what_the_engine_would_choose() -> None:
    seen = SECONDS | {UNDER: SideSeconds(1.0, 1.3, 2.0)}
    row = Row("3x1x64", 8, 1.0, seen, {BEFORE: 1.0, UNDER: 1.0})
    assert row.chosen(has_spare=True) == pytest.approx(0.3)
    assert row.chosen(has_spare=False) == 0.0


def test_the_command_writes_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "swapping.json"
    model = fused_model(tiny_module("LlamaForCausalLM"))
    monkeypatch.setattr(swapping_step, "load_model", lambda *_: model)
    monkeypatch.setattr(swapping_step, "resolve_model", lambda *_: tmp_path)
    monkeypatch.setattr("bench.machine.read_bandwidth_gb_per_second", lambda: 9.0)
    monkeypatch.setattr(swapping_step, "copies_beside_passes", lambda _: False)
    words = ["swapping_step", "--steps", "3x1x64", "--pages", "8", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", [*words, "--pool-mib", "1", "--json", str(path)])
    swapping_step.main()
    written = json.loads(path.read_text())
    assert 0 <= written["slows"] <= 3
    assert written["copies_under_pass"] is False
    assert [row["pages"] for row in written["rows"]] == [8]
    shown = capsys.readouterr().out
    assert "copied before the pass here: +0 to +0 %" in shown
