import sys
from pathlib import Path

import pytest

from kvell.errors import ChangeSomething
from kvell.load.outcome import Outcome
from kvell.load.plot import draw_load
from kvell.load.report import Objectives, summary
from kvell.simulator.report.pictures import check_picture

OBJECTIVES = Objectives(0.5, 0.1)


def run(failed: int = 1, complete: int = 3) -> list[Outcome]:
    good = [
        Outcome(i, float(i), float(i), i + 2.0, (i + 0.5, i + 1.0, i + 2.0), 9, 3)
        for i in range(complete)
    ]
    bad = [Outcome(complete + i, 1.0, 1.0, 1.5, failure="HTTP 500") for i in range(failed)]
    return good + bad


def drawn(path: Path, outcomes: list[Outcome]) -> bytes:
    draw_load(path, "a <b> c", outcomes, OBJECTIVES, summary(outcomes, OBJECTIVES))
    return path.read_bytes()


def test_png(tmp_path: Path) -> None:
    found = drawn(tmp_path / "a.png", run())
    assert found.startswith(b"\x89PNG")
    assert found == drawn(tmp_path / "b.PNG", run()) != drawn(tmp_path / "c.png", run(failed=0))


def test_html_holds_the_figures(tmp_path: Path) -> None:
    text = drawn(tmp_path / "a.html", run()).decode()
    assert text.startswith("<!doctype html>")
    assert "<title>a &lt;b&gt; c</title>" in text
    assert "<th>time to first token</th><td>0.5</td>" in text
    assert "3 completed, 1 failed" in text
    assert text.count("<svg") == 1


@pytest.mark.parametrize("outcomes", [run(0, 1), run(2, 0)])
def test_few_answers_or_none(tmp_path: Path, outcomes: list[Outcome]) -> None:
    assert drawn(tmp_path / "a.svg", outcomes).startswith(b"<?xml")
    page = drawn(tmp_path / "a.html", outcomes).decode()
    assert ("<td>–</td>" in page) == (not any(one.is_complete for one in outcomes))


def test_names_are_checked_before_a_run() -> None:
    check_picture("--plot", Path("a.html"), "load")
    with pytest.raises(ChangeSomething, match=r"--plot=run\.gif: .*use run\.png"):
        check_picture("--plot", Path("run.gif"), "load")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ChangeSomething, match="needs matplotlib"):
        check_picture("--plot", Path("a.png"), "load")
