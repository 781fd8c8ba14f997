"""The template: a process that holds the tokenizer and forks workers that share it.

``python -m kvell.engine.sampling.grammar_process.template FD PARENT`` serves a socket that it
inherits.  A fork takes milliseconds and a tokenizer up to seconds, so a worker is replaced at low
cost.  This process never receives a grammar.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from llguidance._lib import LLTokenizer  # the package itself may import numpy

from kvell.device.available import give_back_freed
from kvell.engine.sampling.grammar_process.limits import end_with_parent
from kvell.engine.sampling.grammar_process.messages import (
    LOWEST,
    End,
    Ended,
    Fork,
    Forked,
    Line,
    LineEnded,
    Load,
    Loaded,
)
from kvell.engine.sampling.grammar_process.worker import serve_worker


class Template:
    """The server of one instance."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._tokenizer: Any = None
        self._workers: set[int] = set()

    def serve(self) -> None:
        while True:
            try:
                request = self._line.receive()
                if isinstance(request, Load):
                    self._line.send(self._load(request))
                    del request  # its text may be as large as the tokenizer
                    gc.freeze()
                    give_back_freed()
                elif isinstance(request, Fork):
                    self._line.send(Forked(self._fork(request)))
                elif isinstance(request, End):
                    self._line.send(Ended(self._end(request.pid)))
            except LineEnded:
                return

    def _load(self, request: Load) -> Loaded:
        try:
            tokenizer: Any = LLTokenizer(
                request.tokenizer_json, eos_token=list(request.end_token_ids) or None
            )
        except Exception as error:  # its text is for the user
            return Loaded(0, str(error))
        self._tokenizer = tokenizer
        return Loaded(tokenizer.vocab_size)

    def _fork(self, request: Fork) -> int:
        descriptor = self._line.descriptors.pop()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                end_with_parent(parent)
                self._line.socket.close()
                os.nice(request.niceness)
                if request.niceness == LOWEST:
                    # A class counts within its session, where Linux groups tasks by session: in the
                    # instance's own, the worker would run before the front does.
                    os.setsid()
                    with contextlib.suppress(OSError):  # there are no such groups
                        Path("/proc/self/autogroup").write_text(str(LOWEST))
                    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
                serve_worker(descriptor, self._tokenizer, request.room_bytes)
            finally:
                os._exit(0)
        os.close(descriptor)
        self._workers.add(pid)
        return pid

    def _end(self, pid: int) -> int | None:
        if pid not in self._workers:
            return None
        self._workers.remove(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:])
    end_with_parent(parent)
    Template(Line(socket.socket(fileno=descriptor))).serve()


if __name__ == "__main__":
    main()
