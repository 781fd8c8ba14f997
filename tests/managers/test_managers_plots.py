"""Pictures and the page of figures, from a matrix that is made up."""

from pathlib import Path
from typing import Any

import pytest

from bench.managers import plots
from bench.managers.pictures import bars, lines
from kvell.simulator.report.shares import Run
from kvell.simulator.report.timeline import GroupMoment, Moment

PNG = b"\x89PNG"
LINES = {"one": {"kvell": [(1, 2.0), (2, 3.0)], "paged": [(1, 1.0), (4, 2.0)]}}


def matrix(**steps: Any) -> dict[str, Any]:
    """Cells of one shape and trace: batch by manager."""
    by_cell = {
        f"gemma3-27b.azure-2023-conv.8.{name.replace('_', '-')}": found
        for name, found in steps.items()
    }
    return {"figures": ["batch_mean", "waste", "hit_rate"], "by_cell": by_cell}


class TestByManager:
    def test_batch_is_a_part_of_pageds(self) -> None:
        panels = plots.by_manager(
            matrix(kvell=[6.0, 0.1, 0.0], paged=[4.0, 0.4, 0.0]), "azure-2023-conv"
        )
        assert panels["batch, of paged's"] == {"gemma3-27b": {"kvell": 1.5, "paged": 1.0}}
        assert panels["waste"]["gemma3-27b"]["kvell"] == 0.1

    def test_a_panel_of_zeros_is_left_out(self) -> None:
        panels = plots.by_manager(
            matrix(kvell=[6.0, 0.1, 0.0], paged=[4.0, 0.4, 0.0]), "azure-2023-conv"
        )
        assert "hit rate" not in panels

    def test_who_refused_has_no_bar(self) -> None:
        told = matrix(static={"refused": "no room"}, paged=[4.0, 0.4, 0.1])
        panels = plots.by_manager(told, "azure-2023-conv")
        assert list(panels["hit rate"]["gemma3-27b"]) == ["paged"]

    def test_without_paged_there_is_nothing_to_compare_with(self) -> None:
        assert plots.by_manager(matrix(kvell=[6.0, 0.1, 0.0]), "azure-2023-conv") == {}
        assert plots.by_manager(matrix(paged=[6.0, 0.1, 0.0]), "mooncake-synthetic") == {}


class TestPictures:
    def test_the_same_figures_are_the_same_bytes(self) -> None:
        first = lines(LINES, "step", "requests", steps=True)
        assert first.startswith(PNG)
        assert first == lines(LINES, "step", "requests", steps=True)
        assert first != lines(LINES, "step", "requests")

    def test_bars_stand_a_missing_manager(self) -> None:
        panels = {"waste": {"gemma3-27b": {"kvell": 0.1, "paged": 0.4}, "jamba": {"kvell": 0.2}}}
        assert bars(panels).startswith(PNG)


class TestPage:
    def test_every_picture_it_names_is_one_that_the_bench_writes(self) -> None:
        text = plots.page("", "", ["azure-2023-conv"])
        named = {part.split(")")[0] for part in text.split("](managers_")[1:]}
        assert named == {"batch.png", "memory.png", "hits.png", "azure-2023-conv.png"}

    def test_without_cells_nothing_is_said_of_them(self) -> None:
        assert "By manager" not in plots.page("", "", [])

    def test_hit_rates_by_number_of_articles(self) -> None:
        found: plots.Hits = {"one at a time": {"kvell": [(1, 0.8), (2, 0.25)]}}
        assert plots.hits_table(found).splitlines() == [
            "| running | manager | 1 | 2 |",
            "| --- | --- | --- | --- |",
            "| one at a time | kvell | 0.800 | 0.250 |",
        ]

    def test_a_batch_is_told_by_step(self) -> None:
        group = GroupMoment("full", 1, 2, 0, 0, 0)
        moments = [
            Moment(step, 0.0, running, 0, 10, 5, (group,)) for step, running in ((3, 2), (7, 1))
        ]
        assert plots.batches(Run("", moments)) == [(3, 2), (7, 1)]


@pytest.mark.parametrize("manager", ["kvell", "paged"])
def test_a_replay_over_time_has_a_moment_for_each_step(manager: Any) -> None:
    one = plots.over_time("ministral-static", manager, 2)
    assert one.report["requests_finished"] == 2
    assert [moment.step for moment in one.run.moments] == list(range(1, one.report["steps"] + 1))
    assert f"| ministral-static | {manager} |" in plots.time_table(
        {("ministral-static", manager): one}
    )


@pytest.mark.parametrize("running", plots.RUNNING.values())
def test_questions_about_one_article_hit_all_but_the_first(running: int) -> None:
    assert plots.hits("kvell", 1, running)["hit_rate"] == pytest.approx(0.8, abs=0.01)


def test_results_lie_beside_the_others() -> None:
    assert plots.PAGE.parent == Path("bench/results")
    assert Path("bench/results/virtual/managers.json") == plots.MATRIX
