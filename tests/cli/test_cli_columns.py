"""Everything that a terminal shows fits into 80 columns."""

import io
import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from rich.console import Console

from kvell.cli.cluster.client import Cluster
from kvell.cli.cluster.table import LEAST_FIRST, cluster_table, print_cluster
from kvell.cli.main import root
from kvell.cli.terminal import figures
from kvell.cli.terminal.help_groups import FIRST, GROUPS, OTHER, group_of
from kvell.cli.terminal.tables import FittingTable
from kvell.cli.top.screen import (
    INSTANCE_LEAST_FIRST,
    Instance,
    InstanceStats,
    Request,
    Requests,
    ServerSnapshot,
    Uses,
    screen,
)
from tests.cli.conftest import Kvell

CLI = Path(figures.__file__).parents[1]
COLUMNS = 80
NO_ROOM = "No room for: "
GIB = 1 << 30
ENGINE_COMMANDS = ("serve", "generate", "chat", "calibrate", "replay")
NAMES = [f"prefill-{n}" for n in range(12)]
PIDS = [2_000_000 + n for n in range(12)]


def commands(group: click.Group, *before: str) -> list[tuple[str, ...]]:
    below = [
        words
        for name, command in group.commands.items()
        if isinstance(command, click.Group)
        for words in commands(command, *before, name)
    ]
    return [*((*before, name) for name in group.commands), *below]


def printed(renderable: Any, columns: int = COLUMNS) -> list[str]:
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(renderable)
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("words", [(), *commands(root)], ids=" ".join)
def test_help(kvell: Kvell, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    for flag in ("--help", *(["--help-all"] if words and words[0] in ENGINE_COMMANDS else [])):
        ended = kvell(*words, flag)
        assert ended.code == 0
        assert [line for line in ended.stdout.splitlines() if len(line) > COLUMNS] == []


def test_help_of_a_server_is_in_groups_with_the_important_flags(kvell: Kvell) -> None:
    short, whole = kvell("serve", "--help").stdout, kvell("serve", "--help-all").stdout
    groups = ("Model", "Memory", "Batching", "Speed", "Instances and cluster", "HTTP and keys")
    for group in (*groups, "Observability"):
        assert f"\n{group}:\n" in short
        assert f"\n{group}:\n" in whole
    assert "\nComparison:\n" in whole
    assert "--manager" in whole
    assert "--manager" not in short
    assert "serve --help-all shows" in short
    assert "\nExample:\n  kvell serve " in short
    assert len(short.splitlines()) < 80


def test_every_flag_of_a_server_has_a_group() -> None:
    others = {
        name
        for option in root.commands["serve"].params
        if isinstance(option, click.Option) and group_of(option.opts) == OTHER
        for name in option.opts
    }
    assert others <= {"--debug", "--help-all", "--json"}
    flags = [flag for flags in GROUPS.values() for flag in flags]
    assert len(flags) == len(set(flags))
    assert {*flags, "--help", "--help-all", "--out"} >= FIRST


class TestTop:
    def seen(self) -> ServerSnapshot:
        uses = Uses(16 * GIB, 3 * GIB, 2 * GIB, GIB, cpu_buffer=8 * GIB)
        stats = InstanceStats(
            *(120, 14, uses, 100_000, 40_000, 1_000_000, 9_000_000, 555),
            {"lent": 400, "borrowed": 12, "returned": 12_345},
            {"threads": 16, "thread_seconds": 100.0, "lost_seconds": 20.0},
        )
        instances = [
            Instance(name, "draining", 3, pid, stats) for name, pid in zip(NAMES, PIDS, strict=True)
        ]
        row = Request(f"chatcmpl-{'f' * 32}", NAMES[0], "running", 12_000, 345, 67.8, 1.234, 0.05)
        return ServerSnapshot(1.0, tuple(instances), Requests(1, 2, (row,)))

    def test_narrow(self) -> None:
        lines = printed(screen(self.seen()))
        assert all(len(line) <= COLUMNS for line in lines)
        for name, pid in zip(NAMES, PIDS, strict=True):
            [row] = [line for line in lines if str(pid) in line]
            assert row.split()[0] == name
            assert "draining, 3 restarts" in row
            assert "…" not in row

    def test_wide(self) -> None:
        text = "\n".join(printed(screen(self.seen()), 200))
        assert all(header in text for header in INSTANCE_LEAST_FIRST)
        assert f"chatcmpl-{'f' * 32}" in text


class TestClusterStatus:
    def cluster(self) -> Cluster:
        instances = [
            {
                "id": name,
                "role": "prefill",
                "serves_as": "decode",
                "state": "draining",
                "pid": pid,
                "restarts": 3,
                "in_flight": 1234,
                "host": "2001:db8::1234:5678",
                "outstanding": {"prompt_tokens": 1_234_567, "output_tokens": 7_654_321},
                "pages": {"large_pages": 12_345, "empty_large_pages": 1_234, "free_bytes": GIB},
                "sections": {"lent": 400, "borrowed": 12},
                "contract_bytes": 16 * GIB,
                "outstanding_prompt_tokens": 1_234_567,
                "outstanding_output_tokens": 7_654_321,
            }
            for name, pid in zip(NAMES, PIDS, strict=True)
        ]
        body = {
            "routing": "least-load",
            "front": {"pid": 1_999_999, "waiting": 12},
            "instances": instances,
            "contract_bytes": 192 * GIB,
        }
        return msgspec.convert(body, Cluster)

    def test_narrow(self) -> None:
        lines = printed(cluster_table(self.cluster()))
        assert all(len(line) <= COLUMNS for line in lines)
        for name, pid in zip(NAMES, PIDS, strict=True):
            [row] = [line for line in lines if line.split()[:1] == [name]]
            assert "draining" in row
            assert str(pid) in row
            assert "…" not in row

    def test_wide(self) -> None:
        text = "\n".join(printed(cluster_table(self.cluster()), 240))
        assert all(header in text for header in LEAST_FIRST)
        assert "No room for" not in text

    @pytest.mark.parametrize("columns", [50, 80, 100, 139, 240])
    def test_a_pipe_is_as_wide_as_columns_says(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        print_cluster(self.cluster())
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= columns and line == line.rstrip() for line in lines)
        [heads] = [line for line in lines if line.split()[:2] == ["instance", "state"]]
        place = next((n for n, line in enumerate(lines) if line.startswith(NO_ROOM)), len(lines))
        left_out = " ".join(lines[place:]).removeprefix(NO_ROOM).split("; ")
        assert {header for header in LEAST_FIRST if header not in heads} == {*left_out} - {""}
        assert bool(lines[place:]) == (columns < 240)

    @pytest.mark.parametrize("given", ["", "0", "-3", "wide", "1e3"])
    def test_a_pipe_has_room_for_all_columns_without_a_width(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
    ) -> None:
        monkeypatch.setenv("COLUMNS", given)
        print_cluster(self.cluster())
        out = capsys.readouterr().out
        assert all(header in out for header in LEAST_FIRST) and NO_ROOM not in out
        assert all(line == line.rstrip() for line in out.splitlines())


def test_a_column_that_a_table_does_not_have_is_not_named_as_left_out() -> None:
    """A cluster on one host has no column of machines."""
    table = FittingTable("", ("a", "b"), [("x" * 9, "y" * 9)], ("other", "b"))
    assert printed(table, 16)[-1] == f"{NO_ROOM}b"


def test_tables_on_stdout_have_one_console() -> None:
    """So the width and the blanks of all tables follow the same rules."""
    makers = {
        str(path.relative_to(CLI))
        for path in CLI.rglob("*.py")
        if re.search(r"\bConsole\((?!stderr=True)", path.read_text())
    }
    assert makers == {"terminal/figures.py"}
