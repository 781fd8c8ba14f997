"""Stages of a run: each in processes of its own, which end at its deadline; rows come one by one.

Nothing of a stage is imported here: what a stage lacks, or what ends its process, is one row that
says so, and the next stage runs.
"""

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.gpu.report import Row

SAID_LETTERS = 1500
"""Letters of a dead process's output that its row keeps."""


@dataclass(frozen=True)
class Stage:
    """A part of the run.

    :param run: ``module:function``; called with (pretends, part, of), it yields rows.
    :param seconds: after so long its processes are ended.
    :param most_parts: processes that may share its rows; 1 for what is timed.
    """

    name: str
    run: str
    seconds: float
    most_parts: int = 1


@dataclass(frozen=True)
class Worker:
    """A process that computes one part of a stage.

    :param log: file that its output goes to.
    """

    process: BaseProcess
    log: Path

    def end_of_log(self) -> str:
        """Return the last letters that the process wrote."""
        return self.log.read_text(errors="replace")[-SAID_LETTERS:] if self.log.exists() else ""


@dataclass(frozen=True)
class Starter:
    """Starts the processes of stages.

    :param context: how; the processes of a fork server share its imports.
    :param workers: processes at most at a time.
    """

    context: BaseContext
    pretends: bool
    workers: int

    def run(self, stages: Iterable[Stage], seconds: float) -> Iterator[Row]:
        """Run stages in order and yield their rows; each stage's last one says how it ended.

        :param seconds: for all stages together; later ones get what is left.
        """
        until = time.monotonic() + seconds
        for stage in stages:
            left = until - time.monotonic()
            begin, ok, count = time.monotonic(), True, 0
            for row in self._rows(stage, min(stage.seconds, left)):
                ok, count = ok and row.get("ok", True), count + 1
                yield self._marked(stage, row)
            took = time.monotonic() - begin
            yield self._marked(stage, {"ended": True, "ok": ok, "rows": count, "seconds": took})

    def _marked(self, stage: Stage, row: Row) -> Row:
        marks: Row = {"stage": stage.name}
        return marks | ({"pretended": True} if self.pretends else {}) | row

    def _rows(self, stage: Stage, seconds: float) -> Iterator[Row]:
        if seconds <= 0:
            yield {"ok": False, "said": "not run: no time is left"}
            return
        until = time.monotonic() + seconds
        with TemporaryDirectory(prefix="kvell-stage-") as folder:
            running: dict[Any, Worker] = {}
            try:
                self._start(stage, Path(folder), running)
                while running:
                    ready = wait(list(running), max(0.0, until - time.monotonic()))
                    if not ready:
                        yield {"ok": False, "said": f"ended at its deadline of {seconds:.0f} s"}
                        return
                    for reader in ready:
                        yield from _received(running, reader)
            except (OSError, EOFError) as error:  # the fork server is dead
                yield {"ok": False, "said": f"no process can be started: {error!r}"}
            finally:
                for worker in running.values():
                    worker.process.kill()
                for worker in running.values():
                    worker.process.join()

    def _start(self, stage: Stage, folder: Path, running: dict[Any, Worker]) -> None:
        parts = max(1, min(stage.most_parts, self.workers))
        for part in range(parts):
            reader, writer = self.context.Pipe(duplex=False)
            log = folder / f"{part}.log"
            process = self.context.Process(  # type: ignore[attr-defined]
                target=compute_part, args=(stage.run, self.pretends, part, parts, writer, log)
            )
            process.start()
            writer.close()
            running[reader] = Worker(process, log)


def _received(running: dict[Any, Worker], reader: Any) -> Iterator[Row]:
    """Yield a row that a process sent; if the process ended, forget it."""
    try:
        yield reader.recv()
    except EOFError:
        worker = running.pop(reader)
        worker.process.join()
        if worker.process.exitcode:
            said = f"a process ended with {worker.process.exitcode}: {worker.end_of_log()}"
            yield {"ok": False, "said": said}


def compute_part(
    run: str, pretends: bool, part: int, of: int, writer: Connection, log: Path
) -> None:
    """Send the rows of one part of a stage; runs in a process of its own."""
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    module, _, name = run.partition(":")
    rows: Callable[[bool, int, int], Iterable[Row]]
    rows = getattr(importlib.import_module(module), name)
    for row in rows(pretends, part, of):
        writer.send(row)


def forking(preloaded: Sequence[str]) -> BaseContext:
    """Return a context whose processes are forked from one that imported these modules."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    return context
