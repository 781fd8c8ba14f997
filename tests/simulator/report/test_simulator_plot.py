"""Pictures of timelines: what is drawn, how high, and in which files."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething
from kvell.simulator.report.plot import (
    STATES,
    Run,
    draw,
    hues_of,
    mean_parts,
    mean_running,
    state_bytes,
    thin,
    unit_of,
)
from kvell.simulator.report.timeline import GroupMoment, Moment, Timeline
from kvell.vocabulary import GIB, KIB, MIB
from tests.simulator.replays import busy_rows, layout_of, make_replay

PNG = b"\x89PNG\r\n\x1a\n"
SVG = "{http://www.w3.org/2000/svg}"


def moment(step: int = 1, running: int = 2, *groups: GroupMoment) -> Moment:
    shown = groups or (GroupMoment("full", 60, 80, 10, 10, 40),)
    return Moment(step, step * 0.5, running, 0, 256, 64, shown)


@pytest.fixture(scope="module")
def replayed() -> list[Run]:
    runs = []
    for large_pages in (24, 40):
        timeline = Timeline()
        layout = layout_of((0, 1), (9, 2), large_pages=large_pages)
        make_replay(layout, busy_rows(1), timeline=timeline)
        runs.append(Run(f"{large_pages} pages & more", timeline.moments))
    return runs


class TestBytes:
    def test_states_of_one_group(self) -> None:
        # 256 bytes: 100 held, 64 empty, so the cache has 92.
        assert state_bytes(moment()) == [(60, 20, 10, 10, 92.0)]

    def test_the_cache_is_divided_as_cached_bytes_are(self) -> None:
        groups = (GroupMoment("full", 0, 0, 0, 0, 30), GroupMoment("sliding(9)", 0, 0, 0, 0, 10))
        assert [states[4] for states in state_bytes(moment(1, 0, *groups))] == [144.0, 48.0]

    def test_nothing_cached(self) -> None:
        assert state_bytes(moment(1, 1, GroupMoment("full", 9, 16, 0, 0, 0))) == [(9, 7, 0, 0, 0)]

    def test_states_never_overlap_where_needed_is_counted_high(self) -> None:
        assert state_bytes(moment(1, 1, GroupMoment("full", 99, 80, 0, 0, 0)))[0][:2] == (80, 0)

    def test_with_empty_they_fill_the_pool(self, replayed: list[Run]) -> None:
        for run in replayed:
            for each in run.moments:
                drawn = np.asarray(state_bytes(each)).sum() + each.empty_bytes
                assert drawn == pytest.approx(each.pool_bytes)

    def test_means_are_parts_of_the_pool(self, replayed: list[Run]) -> None:
        for run in replayed:
            parts = mean_parts(run.moments)
            assert len(parts) == len(STATES) + 1
            assert sum(parts) == pytest.approx(1.0)
            assert all(0 <= part <= 1 for part in parts)

    def test_mean_running(self) -> None:
        assert mean_running(Run("", [moment(1, 2), moment(2, 5)])) == 3.5


class TestScales:
    @pytest.mark.parametrize(
        ("pool_bytes", "unit"),
        [(40 * GIB, ("GiB", GIB)), (GIB - 1, ("MiB", MIB)), (100, ("KiB", KIB))],
    )
    def test_units(self, pool_bytes: int, unit: tuple[str, int]) -> None:
        assert unit_of(pool_bytes) == unit

    @given(st.integers(1, 500), st.integers(2, 60))
    def test_thinning_keeps_both_ends(self, count: int, most: int) -> None:
        steps = [each.step for each in thin([moment(i) for i in range(count)], most)]
        assert len(steps) == min(count, most)
        assert (steps[0], steps[-1]) == (0, count - 1)
        assert steps == sorted(set(steps))

    def test_a_group_has_one_colour_in_all_runs(self) -> None:
        names = [["all"], ["sliding(4)", "full"], ["full", "sliding(4)"]]
        runs = [
            Run("", [moment(1, 1, *(GroupMoment(name, 0, 0, 0, 0, 0) for name in each))])
            for each in names
        ]
        assert list(hues_of(runs)) == ["all", "sliding(4)", "full"]
        assert len(set(hues_of(runs).values())) == 3


class TestFiles:
    def test_png(self, tmp_path: Path, replayed: list[Run]) -> None:
        draw(replayed, tmp_path / "m.png")
        content = (tmp_path / "m.png").read_bytes()
        assert content.startswith(PNG)
        width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))
        assert width > 2 * height

    def test_svg_has_a_shape_for_each_group_and_state_that_occurs(
        self, tmp_path: Path, replayed: list[Run]
    ) -> None:
        draw(replayed[:1], tmp_path / "m.svg")
        root = ElementTree.parse(tmp_path / "m.svg").getroot()
        shapes = [e for e in root.iter(f"{SVG}g") if "FillBetween" in e.get("id", "")]
        occurring = np.asarray([state_bytes(each) for each in replayed[0].moments]).any(axis=0)
        assert occurring.sum() > 5
        assert len(shapes) == occurring.sum() + 2  # empty, and the batch

    @pytest.mark.parametrize(
        "name",
        ["m.svg", *(pytest.param(name, marks=pytest.mark.long) for name in ("m.png", "m.html"))],
    )
    def test_the_same_bytes_each_time(self, tmp_path: Path, replayed: list[Run], name: str) -> None:
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
            draw(replayed, tmp_path / folder / name)
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()

    def test_html_stands_alone_and_tells_the_means(
        self, tmp_path: Path, replayed: list[Run]
    ) -> None:
        draw(replayed, tmp_path / "m.HTML", "time")
        page = (tmp_path / "m.HTML").read_text()
        assert page.startswith("<!doctype html>")
        assert "<script" not in page
        assert not re.search(r"(src|<link)\b", page)
        assert "<th>40 pages &amp; more</th>" in page
        assert page.count("%</td>") == 2 * (len(STATES) + 1)
        assert f"{mean_parts(replayed[1].moments)[0]:.2%}" in page

    @pytest.mark.parametrize("over", ["step", "time"])
    def test_a_single_moment(self, tmp_path: Path, over: str) -> None:
        run = Run("one", [moment()])
        draw([run], tmp_path / "m.svg", "time" if over == "time" else "step")
        assert (tmp_path / "m.svg").stat().st_size > 1_000

    def test_runs_over_different_pools_and_groups(self, tmp_path: Path) -> None:
        small = replace(moment(), pool_bytes=128, empty_bytes=20)
        other = moment(5, 3, GroupMoment("all", 10, 20, 0, 0, 0))
        runs = [Run("a", [small]), Run("b", [other]), Run("c", [moment()])]
        draw(runs, tmp_path / "m.png")
        assert (tmp_path / "m.png").read_bytes().startswith(PNG)

    def test_another_suffix(self, tmp_path: Path) -> None:
        with pytest.raises(ChangeSomething, match=r"ends in none of .*; use memory.png"):
            draw([Run("a", [moment()])], tmp_path / "memory.pdf")

    def test_without_matplotlib(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ChangeSomething, match=r"pip install 'kvell\[plot\]'"):
            draw([Run("a", [moment()])], tmp_path / "m.png")

    def test_nothing_is_left_changed(self, tmp_path: Path) -> None:
        import matplotlib

        before = dict(matplotlib.rcParams)
        draw([Run("a", [moment()])], tmp_path / "m.svg")
        assert dict(matplotlib.rcParams) == before
