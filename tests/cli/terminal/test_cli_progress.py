"""Lines of progress where stderr is no terminal."""

import threading

import pytest

from kvell.cli.terminal.progress import StageLines, repeat, stage_lines


def test_a_stage_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with stage_lines("loading") as report:
        report("loading", 0.0)
        report("loading", 0.5)
        report("done", 1.0)
    assert capsys.readouterr().err == "kvell: loading …\nkvell: done …\n"
    assert threading.active_count() == before


def test_a_stage_that_lasts_is_printed_again(capsys: pytest.CaptureFixture[str]) -> None:
    lines = StageLines("loading")
    stages = iter(["", "packing", "packing", None])

    def wait() -> bool:
        stage = next(stages)
        if stage:
            lines(stage, 0.5)
        return stage is None

    repeat(lines, wait)
    assert capsys.readouterr().err.splitlines() == [
        "kvell: loading … 4 s",
        "kvell: packing …",
        "kvell: packing … 8 s",
        "kvell: packing … 12 s",
    ]
