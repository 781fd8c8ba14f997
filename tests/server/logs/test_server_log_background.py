"""A log that nobody reads: who writes it never waits, and what is lost is counted."""

import fcntl
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click
import pytest

from kvell.cli.terminal.stderr import stderr_to
from kvell.server.logs.background import MOST_WAITING, BackgroundStream, in_background, unwritten
from kvell.server.logs.lines import lines_on, tell

DEADLINE_SECONDS = 20.0
LINE = "a line xx\n"
logger = logging.getLogger("kvell.some.module")

PROGRAM = """
import logging, sys
from kvell.cli.terminal.stderr import stderr_to
from kvell.server.logs.lines import lines_on, tell
with lines_on(sys.stderr, "json") as log, stderr_to(log, 0.01):
    tell(logging.getLogger("kvell"), logging.INFO, "event")
    print("printed", file=sys.stderr)
print("a last line", file=sys.stderr)
sys.exit(3)
"""


class FullPipe:
    """A pipe whose writers wait: nobody has read what fills it."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self._filled, self._text = 0, b""
        flags = fcntl.fcntl(self.write_end, fcntl.F_GETFL)
        fcntl.fcntl(self.write_end, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        try:
            while True:
                self._filled += os.write(self.write_end, b"x" * 512)
        except BlockingIOError:
            fcntl.fcntl(self.write_end, fcntl.F_SETFL, flags)

    def read_lines(self, count: int) -> list[str]:
        while self._filled:
            self._filled -= len(os.read(self.read_end, self._filled))
        while self._text.count(b"\n") < count:
            self._text += os.read(self.read_end, 1 << 16)
        *lines, self._text = self._text.split(b"\n", count)
        return [line.decode() for line in lines]


@contextmanager
def full_pipe() -> Iterator[tuple[FullPipe, io.TextIOWrapper]]:
    pipe = FullPipe()
    with os.fdopen(pipe.write_end, "w", encoding="utf-8") as stream:
        yield pipe, stream
    os.close(pipe.read_end)


def describe(lines: int) -> str:
    return f"{unwritten(lines)}\n"


def test_who_writes_never_waits_and_lost_lines_are_counted_in_their_place() -> None:
    with full_pipe() as (pipe, stream):
        background = BackgroundStream(stream, describe, most_waiting=10 * len(LINE))
        for _ in range(60):
            assert background.write(LINE) == len(LINE)
        assert pipe.read_lines(10) == [LINE.strip()] * 10
        background.write("after\n")
        lost, after = pipe.read_lines(2)
        assert lost == "50 lines of the log were not written: its reader was too slow"
        assert after == "after"
        assert background.end()


def test_lines_of_many_threads_are_whole_and_each_threads_in_order() -> None:
    stream = io.StringIO()
    with in_background(stream) as background:
        threads = [
            threading.Thread(target=lambda n=n: [background.write(f"{n} {i}\n") for i in range(99)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = stream.getvalue().splitlines()
    for n in range(4):
        own = [line for line in lines if line.startswith(f"{n} ")]
        assert own == [f"{n} {i}" for i in range(99)]


def test_the_end_waits_for_a_reader_only_so_long() -> None:
    with full_pipe() as (pipe, stream):
        background = BackgroundStream(stream, describe)
        background.write(LINE)
        assert not background.end(0.01)
        assert not background.end(), "only the first call waits"
        background.write("too late\n")
        assert pipe.read_lines(1) == [LINE.strip()]


def test_a_reader_that_has_left_disturbs_nobody() -> None:
    with full_pipe() as (pipe, stream):
        background = BackgroundStream(stream, describe)
        os.close(pipe.read_end)
        pipe.read_end = os.open(os.devnull, os.O_RDONLY)
        background.write(LINE)
        assert background.end()


def test_the_log_of_a_server_counts_what_nobody_read() -> None:
    with full_pipe() as (pipe, stream):
        count = 2 * MOST_WAITING // 10_000
        with lines_on(stream, "json"):
            for number in range(count):
                tell(logger, logging.INFO, "event", number=number, text="x" * 10_000)
            first = json.loads(pipe.read_lines(1)[0])
            assert (first["event"], first["number"]) == ("event", 0)
            pipe.read_lines(MOST_WAITING // 2 // 10_000)  # there is room again
            tell(logger, logging.INFO, "after")
            rest = [json.loads(line) for line in _until(pipe, "after")]
    *_, lost, after = rest
    assert after["event"] == "after"
    assert lost["event"] == "lines_not_written"
    assert count // 3 < lost["lines"] < count * 2 // 3


def _until(pipe: FullPipe, event: str) -> list[str]:
    lines: list[str] = []
    while not lines or f'"{event}"' not in lines[-1]:
        lines += pipe.read_lines(1)
    return lines


def test_what_is_printed_is_in_the_order_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stderr
    with lines_on(sys.stderr, "text") as log, stderr_to(log):
        tell(logger, logging.INFO, "first")
        click.echo("second", err=True)
        tell(logger, logging.INFO, "third")
    assert sys.stderr is before
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in lines] == ["first", "second", "third"]


def test_a_process_ends_although_nobody_reads_its_log() -> None:
    with full_pipe() as (_, stream):
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM], stderr=stream, check=False, timeout=DEADLINE_SECONDS
        )
    assert ended.returncode == 3
