"""Exit codes, and the one line that tells the user what to change."""

from collections.abc import Callable

import click
import pytest

from kvell.cli.terminal.faults import Debug, as_flags, run_guarded
from kvell.errors import ChangeSomething, InstanceDied


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


CHANGE = ChangeSomething("kv_memory_bytes", "1KiB", "holds no page", "use at least 720KiB")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (CHANGE, 2, "kvell: --kv-memory=1KiB: holds no page; use at least 720KiB"),
        (click.UsageError("No such option."), 2, "kvell: No such option"),
        (click.FileError("x.json", "gone"), 2, "kvell: Could not open file 'x.json': gone"),
        (InstanceDied("the instance ended"), 1, "kvell: the instance ended"),
        (KeyError("x"), 1, "kvell: this is a bug: KeyError: 'x' (--debug shows where)"),
        (ValueError("two\n  lines"), 1, "kvell: this is a bug: ValueError: two lines (--debug"),
    ],
)
def test_one_line_and_a_code(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_guarded(raising(error), Debug()) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(line)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("error", [CHANGE, RuntimeError("broken")])
def test_debug_shows_the_traceback_too(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    run_guarded(raising(error), Debug(on=True))
    stderr = capsys.readouterr().err
    assert "Traceback (most recent call last)" in stderr
    assert stderr.splitlines()[-1].startswith("kvell: ")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_interrupt_says_nothing(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(raising(error), Debug()) == 130
    assert capsys.readouterr().err == ""


def test_done() -> None:
    assert run_guarded(lambda: None, Debug()) == 0


def test_code_that_click_asks_for() -> None:
    assert run_guarded(raising(click.exceptions.Exit(3)), Debug()) == 3


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("max_model_len", "--max-model-len"),
        ("kv_cache_dtype", "--kv-cache-dtype"),
        ("quantization", "--quantization"),
        ("kv_memory_bytes", "--kv-memory"),
        ("model", "--model"),
        ("--kv-memory", "--kv-memory"),
        ("weights.safetensors", "weights.safetensors"),
    ],
)
def test_fields_become_the_flags_that_set_them(field: str, flag: str) -> None:
    assert as_flags(ChangeSomething(field, 1, "p", "r")) == f"{flag}=1: p; r"
