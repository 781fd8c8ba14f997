"""The command as a whole: help, flags, and how it is started."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.cli.late_commands import COMMANDS as LISTED
from kvell.cli.main import root, shown_program

Kvell = Callable[..., Any]

COMMANDS = ["generate", "chat", "serve", "plan"]


def test_help_fits_one_screen(kvell: Kvell) -> None:
    ended = kvell("--help")
    assert ended.code == 0
    assert len(ended.stdout.splitlines()) <= 24
    assert all(f"\n  {name} " in ended.stdout for name in COMMANDS)


def test_instance_is_hidden_but_there(kvell: Kvell) -> None:
    assert "instance" not in kvell("--help").stdout
    assert "--socket-fd" in kvell("instance", "--help").stdout


def test_every_command_is_listed_unless_it_is_hidden() -> None:
    for name, (_, line) in LISTED.items():
        command = root.commands[name]
        assert command.name == name
        assert command.hidden == (not line)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(kvell: Kvell, name: str) -> None:
    ended = kvell(name, "--help-all" if name != "plan" else "--help")
    assert ended.code == 0
    assert "--model" in ended.stdout
    assert "--debug" in ended.stdout


def test_version(kvell: Kvell) -> None:
    assert kvell("--version").stdout.startswith("kvell, version ")


def test_no_command_shows_help(kvell: Kvell) -> None:
    ended = kvell()
    assert ended.code == 2
    assert "Commands:" in ended.stderr


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["frob"], "kvell: No such command 'frob'; see kvell --help"),
        (["generate", "--frob"], "kvell: No such option '--frob'; see kvell generate --help"),
        (["generate", "--dtype", "int3", "--prompt", "x"], "kvell: Invalid value for '--dtype'"),
        (["serve", "--port", "99999"], "kvell: Invalid value for '--port': 99999"),
        (["chat", "--max-num-seqs", "0"], "kvell: Invalid value for '--max-num-seqs': 0"),
        (["chat", "--max-model-len", "long"], "kvell: Invalid value for '--max-model-len'"),
        (["plan", "--kv-memory", "much"], "kvell: --kv-memory=much: is not a size; write"),
        (["chat", "--temperature", "-1"], "kvell: --temperature=-1.0: must be between 0 and 100"),
        (["chat", "--top-p", "0"], "kvell: --top-p=0.0: must be above 0"),
    ],
)
def test_wrong_flags_end_with_one_line(kvell: Kvell, args: list[str], line: str) -> None:
    ended = kvell(*args)
    assert ended.code == 2
    assert ended.stderr.startswith(line)
    assert ended.stderr.count("\n") == 1
    assert ended.stdout == ""


@pytest.mark.parametrize("before", [True, False])
def test_debug_works_on_either_side_of_the_command(kvell: Kvell, before: bool) -> None:
    flags = ["--kv-memory", "much"]
    ended = kvell("--debug", "plan", *flags) if before else kvell("plan", *flags, "--debug")
    assert ended.code == 2
    assert "Traceback" in ended.stderr


class TestShownProgram:
    def test_below_the_working_directory(self) -> None:
        assert shown_program(Path("/a/b/.venv/bin/kvell"), Path("/a/b")) == ".venv/bin/kvell"

    def test_run_as_a_module(self) -> None:
        assert shown_program(Path("/a/kvell/cli/main.py"), Path("/a")) == "kvell"

    def test_elsewhere(self) -> None:
        assert shown_program(Path("/usr/bin/kvell"), Path("/home/ada")) == "kvell"


class TestProcess:
    """Behaviour that only a real process shows."""

    def test_help_loads_neither_torch_nor_transformers(self) -> None:
        script = (
            "import sys; from kvell.cli.main import root; "
            "root.main(['--help'], standalone_mode=False); "
            "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'kvell.engine')))"
        )
        assert start("-c", script).returncode == 0

    def test_bad_input_has_no_traceback(self) -> None:
        ended = start(
            "-m", "kvell.cli.main", "plan", "--model", "/no/such/model", "--kv-memory", "1GiB"
        )
        assert ended.returncode == 2
        assert ended.stderr.splitlines()[-1].startswith("kvell: --model=/no/such/model: ")
        assert "Traceback" not in ended.stderr

    def test_a_reader_that_leaves_is_no_error(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvell.cli.main", "--help"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        stderr = process.stderr.read()
        process.stderr.close()
        assert process.wait(timeout=60) == 0
        assert stderr == ""


def start(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
    )
