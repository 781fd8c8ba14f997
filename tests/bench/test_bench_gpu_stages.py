"""Stages of a run on a GPU: deadlines, failures, rows that are kept as they come."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.gpu import check
from bench.gpu.check import STAGES, chosen, main, taken
from bench.gpu.report import Row, line, read_of, summary
from bench.gpu.stages import Stage, Starter, forking
from bench.result_file import read


def counts(pretends: bool, part: int, of: int) -> Iterator[Row]:
    yield {"check": f"{part} of {of}", "ok": True, "said": "holds"}


def hangs(pretends: bool, part: int, of: int) -> Iterator[Row]:
    yield {"check": "before", "ok": True, "said": "holds"}
    threading.Event().wait()


def raises(pretends: bool, part: int, of: int) -> Iterator[Row]:
    yield {"check": "before", "ok": True, "said": "holds"}
    raise RuntimeError("no such kernel")


def dies(pretends: bool, part: int, of: int) -> Iterator[Row]:
    yield from ()
    os.write(1, b"out of memory")
    os._exit(3)


def finds_a_gpu(pretends: bool, part: int, of: int) -> Iterator[Row]:
    yield {"gpu": "a GPU"}


def finds_none(pretends: bool, part: int, of: int) -> Iterator[Row]:
    yield from ()


def stage(name: str, seconds: float = 600, parts: int = 1) -> Stage:
    return Stage(name, f"{__name__}:{name}", seconds, parts)


def rows_of(*stages: Stage, seconds: float = 600, pretends: bool = False) -> list[Row]:
    return list(Starter(forking([]), pretends, workers=3).run(stages, seconds))


def test_rows_name_their_stage_and_its_end_comes_last() -> None:
    first, last = rows_of(stage("counts"))
    assert first == {"stage": "counts", "check": "0 of 1", "ok": True, "said": "holds"}
    assert (last["stage"], last["ended"], last["ok"], last["rows"]) == ("counts", True, True, 1)


def test_parts_run_in_processes_and_pretended_rows_are_marked() -> None:
    rows = rows_of(stage("counts", parts=8), pretends=True)
    assert {row["check"] for row in rows[:-1]} == {"0 of 3", "1 of 3", "2 of 3"}
    assert all(row["pretended"] for row in rows)


def test_a_stage_ends_at_its_deadline_and_the_next_one_runs() -> None:
    rows = rows_of(stage("hangs", seconds=1), stage("counts"))
    [late] = [row for row in rows if "deadline" in row.get("said", "")]
    assert (late["stage"], late["ok"]) == ("hangs", False)
    assert [row["ok"] for row in rows if "ended" in row] == [False, True]


@pytest.mark.parametrize(
    ("name", "said"),
    [("raises", "RuntimeError: no such kernel"), ("dies", "ended with 3: out of memory")],
)
def test_a_process_that_fails_is_a_row_and_the_next_stage_runs(name: str, said: str) -> None:
    rows = rows_of(stage(name), stage("counts"))
    [failed] = [row for row in rows if not row["ok"] and "ended" not in row]
    assert said in failed["said"]
    assert rows[-1] == rows[-1] | {"stage": "counts", "ok": True, "rows": 1}


def test_stages_without_time_say_so() -> None:
    rows = rows_of(stage("counts"), stage("hangs"), seconds=0)
    assert [row["said"] for row in rows if "said" in row] == ["not run: no time is left"] * 2


def test_each_row_is_kept_before_the_next_is_computed(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"

    def computed() -> Iterator[Row]:
        for count in range(3):
            yield {"stage": "exact", "check": str(count), "ok": count != 1, "said": "a\nb"}
            assert read(out)["rows"][-1]["check"] == str(count)
            assert (
                f"{(count + 2) // 2} of {count + 1} checks" in out.with_suffix(".txt").read_text()
            )

    assert len(taken(computed(), out, "a GPU")) == 3
    assert read(out)["run"]["processor"] == "a GPU"
    assert "FAILED 1: b" in out.with_suffix(".txt").read_text()


def test_stages_are_chosen_by_name_and_keep_their_order() -> None:
    assert [each.name for each in chosen("contract, machine")] == ["machine", "contract"]
    assert chosen(None) == list(STAGES)
    with pytest.raises(SystemExit, match=r"no such stages: x; choose of machine, "):
        chosen("machine,x")


@pytest.mark.parametrize(
    ("probe", "run", "status"),
    [("finds_none", "counts", 2), ("finds_a_gpu", "raises", 1), ("finds_a_gpu", "counts", 0)],
)
def test_the_status_says_what_came_of_it(
    probe: str, run: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "PROBE", stage(probe))
    monkeypatch.setattr(check, "STAGES", (stage(run),))
    try:
        assert main([]) == status
    except SystemExit as end:
        assert end.code == status


def test_a_recorded_run_is_a_table() -> None:
    rows = read(Path(__file__).with_name("recorded_gpu_check.json"))["rows"]
    assert all(len(line(row, read_of(rows)).splitlines()) == 1 for row in rows)
    text = summary(rows)
    assert "59% of read" in text
    assert text.endswith("104 of 104 checks hold\ngoal of 80% on decode missed\n")
