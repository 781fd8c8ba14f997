"""The bench of prefill and decode instances in virtual time."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.pd import virtual
from bench.pd.virtual import (
    CACHINGS,
    COLOCATED,
    COMPARISONS,
    FIGURES,
    REAL,
    SHAPES,
    WHOLE,
    Case,
    changes,
    rows_of,
)

CASE = Case(
    *("loogle-like", "1P1D", " + caching", 4.0, 15, str(virtual.HERE / "h800-x2.toml")),
    *("nvlink-h800", 2_048),
)


def figures(seconds: float) -> dict[str, Any]:
    return {figure: {"mean": seconds, "p99": 2 * seconds} for figure in FIGURES}


def test_a_case_gives_every_figure() -> None:
    found = virtual.run(CASE)
    assert (found["requests_finished"], found["requests_refused"]) == (15, 0)
    assert found["name"] == "1P1D + caching"
    assert 10 <= found["requests_moved"] <= 15
    assert found["roles"]["prefill"]["hit_rate"] > 0.5
    for figure in FIGURES:
        assert 0 < found[figure]["mean"] <= found[figure]["p99"]
    assert found["ttft"]["mean"] < found["jct"]["mean"]


def test_without_caching_nothing_is_hit() -> None:
    found = virtual.run(replace(CASE, caching=""))
    assert found["roles"]["prefill"]["hit_rate"] == 0


def test_whole_prompts_hold_decodes_up_and_chunks_do_not() -> None:
    """The same work, and what a prompt takes is taken of everybody's answers."""
    loaded = replace(CASE, workload="react-like", shape="2 colocated", caching="", requests=60)
    chunked, whole = (virtual.run(replace(loaded, shape=f"2 colocated{s}")) for s in ("", WHOLE))
    assert chunked["requests_finished"] == whole["requests_finished"] == 60
    assert whole["tpot"]["p99"] > chunked["tpot"]["p99"]


def test_the_rate_is_for_each_instance() -> None:
    spans = {
        shape: rows_of(replace(CASE, shape=shape, requests=400))[-1].arrival_s for shape in SHAPES
    }
    assert spans["1P1D"] == spans["2 colocated"] == pytest.approx(400 / 8, rel=0.2)
    assert spans["1P2D"] == spans["3 colocated"] == pytest.approx(spans["1P1D"] * 2 / 3)


def test_a_real_trace_is_cut_to_the_context(tmp_path: Path) -> None:
    import gzip

    lengths = [100, 5_000, 200, 4_090, 300]
    lines = [
        json.dumps({"arrival_s": 1.0 * i, "prompt_tokens": one, "output_tokens": 10})
        for i, one in enumerate(lengths)
    ]
    with gzip.open(tmp_path / f"{REAL}.jsonl.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    rows = rows_of(replace(CASE, workload=REAL, traces=tmp_path))
    assert [row.prompt_tokens for row in rows] == [100, 200, 300]


def test_changes_are_over_as_many_colocated_instances() -> None:
    seconds = {f"{shape}{caching}": 1.0 for shape in SHAPES for caching in CACHINGS}
    seconds |= {"1P2D": 0.5, "1P2D + caching": 0.4, "3 colocated + caching": 0.8}
    seconds |= {f"3 colocated{WHOLE}": 2.0, f"3 colocated{WHOLE} + caching": 1.6}
    found = [
        {"workload": "w", "rate": 2.0, "name": name, **figures(one)}
        for name, one in seconds.items()
    ]
    told = {one["shape"]: one for one in changes(found)}
    assert told.keys() == COLOCATED.keys()
    assert all(set(COMPARISONS) <= one.keys() for one in told.values())
    one = told["1P2D"]
    for part in ("mean", "p99"):
        assert one["pd_over_colocated"]["jct"][part] == pytest.approx(-0.5)
        assert one["pd_over_whole"]["jct"][part] == pytest.approx(-0.75)
        assert one["pd_caching_over_whole_caching"]["jct"][part] == pytest.approx(-0.75)
        assert one["caching_over_pd"]["ttft"][part] == pytest.approx(-0.2)
        assert one["pd_caching_over_colocated_caching"]["tpot"][part] == pytest.approx(-0.5)
    assert told["1P1D"]["pd_over_colocated"]["jct"]["mean"] == 0


KINDS = ("2 colocated", f"2 colocated{WHOLE}", "1P1D")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(virtual, "SHAPES", {name: SHAPES[name] for name in KINDS})
    monkeypatch.setattr(virtual, "COLOCATED", {"1P1D": "2 colocated"})
    return virtual.main


def test_the_command_writes_what_it_shows(
    quick: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pd.json"
    asked = ["--workloads", "react-like", "--rates", "2", "--requests", "8", "--json", str(path)]
    quick(asked)
    written = json.loads(path.read_text())
    assert written["run"]["processor"] == "virtual"
    assert {one["name"] for one in written["runs"]} == {
        f"{name}{caching}" for name in KINDS for caching in CACHINGS
    }
    assert len(written["changes"]) == 1
    shown = capsys.readouterr().out
    assert "1P1D" in shown and "pd over colocated" in shown and "pd over whole" in shown
