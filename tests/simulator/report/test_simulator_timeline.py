"""Timelines: bounded, evenly spaced, true to the pool, and read back as written."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething
from kvell.simulator.report.timeline import (
    GroupMoment,
    Moment,
    Timeline,
    read_timeline,
    write_timeline,
)
from tests.simulator.replays import busy_rows, layout_of, make_replay, row

GROUP = GroupMoment("full", 60, 80, 10, 5, 40)
MOMENT = Moment(3, 1.5, 2, 7, 200, 64, (GROUP, replace(GROUP, name="sliding(4)", used_bytes=0)))


def numbered(step: int) -> Callable[[], Moment]:
    return lambda: replace(MOMENT, step=step)


class TestThinning:
    @given(st.integers(1, 40), st.integers(0, 700))
    def test_bounded_and_even(self, most: int, steps: int) -> None:
        timeline = Timeline(most)
        for step in range(steps):
            timeline.offer(numbered(step))
        kept = [moment.step for moment in timeline.moments]
        assert kept == list(range(0, steps, timeline.every))
        assert len(kept) <= most
        assert timeline.every == 1 or 2 * len(kept) >= most

    def test_only_kept_steps_are_looked_at(self) -> None:
        looked: list[int] = []
        timeline = Timeline(4)

        def look(step: int) -> Moment:
            looked.append(step)
            return replace(MOMENT, step=step)

        for step in range(64):
            timeline.offer(lambda step=step: look(step))  # type: ignore[misc]
        assert len(looked) < 20
        assert [moment.step for moment in timeline.moments] == [0, 16, 32, 48]


class TestReplayed:
    def test_every_step_of_a_short_run(self) -> None:
        timeline = Timeline()
        run = make_replay(layout_of((0, 1)), [row(5, 3), row(5, 1)], timeline=timeline)
        assert [m.step for m in timeline.moments] == [1, 2, 3]
        assert [m.running for m in timeline.moments] == [2, 1, 1]
        assert [m.virtual_seconds for m in timeline.moments] == pytest.approx([1, 2, 3], abs=0.01)
        assert timeline.moments[0].groups[0].needed_bytes == 10 * 32
        assert timeline.moments[0].pool_bytes == run.report()["kv_memory_bytes"]

    def test_waiting_are_those_who_have_come(self) -> None:
        layout, timeline = layout_of((0, 1), large_pages=3), Timeline()
        rows = [row(7, 2), row(7, 1, at=0.5), row(7, 1, at=1.5), row(5, 1, at=99.0)]
        make_replay(layout, rows, "trace", timeline=timeline)
        assert [(m.running, m.waiting) for m in timeline.moments][:3] == [(1, 1), (1, 2), (1, 1)]
        assert timeline.moments[-1].waiting == 0

    @pytest.mark.parametrize("seed", range(3))
    def test_groups_cache_and_empty_fill_the_pool(self, seed: int) -> None:
        layout, timeline = layout_of((0, 1), (9, 2), large_pages=40), Timeline()
        run = make_replay(layout, busy_rows(seed), timeline=timeline)
        assert len(timeline.moments) == run.report()["steps"]
        evictable = [moment.evictable_bytes for moment in timeline.moments]
        assert all(n >= 0 and n % layout.large_page_bytes == 0 for n in evictable)
        assert max(evictable) > 0
        for moment, sample in zip(timeline.moments, run.means.samples, strict=True):
            assert moment.running == sample.running
            assert [g.name for g in moment.groups] == [g.name for g in layout.groups]
            assert [g.used_bytes for g in moment.groups] == [g.used_bytes for g in sample.groups]

    def test_a_timeline_changes_nothing(self) -> None:
        runs = [
            make_replay(layout_of((0, 1), large_pages=20), busy_rows(4), timeline=timeline)
            for timeline in (None, Timeline(3))
        ]
        assert runs[0].requests == runs[1].requests
        assert runs[0].means.samples == runs[1].means.samples


class TestFiles:
    @pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
    def test_round_trip(self, tmp_path: Path, name: str) -> None:
        moments = [MOMENT, replace(MOMENT, step=9, running=0)]
        write_timeline(tmp_path / name, moments)
        assert read_timeline(tmp_path / name) == moments

    def test_a_line_is_an_object_of_plain_names(self, tmp_path: Path) -> None:
        write_timeline(tmp_path / "t.jsonl", [MOMENT])
        (line,) = (tmp_path / "t.jsonl").read_text().splitlines()
        raw = json.loads(line)
        assert (raw["step"], raw["virtual_seconds"], raw["waiting"]) == (3, 1.5, 7)
        assert raw["groups"][0] == {
            "name": "full",
            "needed_bytes": 60,
            "used_bytes": 80,
            "unwritten_bytes": 10,
            "stranded_bytes": 5,
            "cached_bytes": 40,
        }

    @pytest.mark.parametrize(
        "change",
        [
            {"step": None},
            {"running": -1},
            {"groups": [{"name": "full"}]},
            {"groups": 3},
            {"pool_bytes": "much"},
            {"groups": []},
        ],
    )
    def test_a_wrong_line_is_named(self, tmp_path: Path, change: dict[str, Any]) -> None:
        path = tmp_path / "t.jsonl"
        write_timeline(path, [MOMENT, MOMENT])
        first, second = path.read_text().splitlines()
        path.write_text(first + "\n" + json.dumps(json.loads(second) | change) + "\n")
        with pytest.raises(ChangeSomething) as caught:
            read_timeline(path)
        assert str(caught.value.value) == f"{path}:2"

    @pytest.mark.parametrize("text", ["{", "[1]", "7", '{"step": 1}'])
    def test_no_timeline_at_all(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(text)
        with pytest.raises(ChangeSomething, match=r"is not a step of a timeline.*--timeline"):
            read_timeline(path)

    def test_empty_or_missing(self, tmp_path: Path) -> None:
        (tmp_path / "empty.jsonl").touch()
        with pytest.raises(ChangeSomething, match="holds no step"):
            read_timeline(tmp_path / "empty.jsonl")
        with pytest.raises(ChangeSomething, match="cannot be read"):
            read_timeline(tmp_path / "missing.jsonl")
