"""The instance's control of one model's grammar processes: start, fork, end."""

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from os import getpid

from kvell.engine.sampling.grammar_process.messages import (
    End,
    Ended,
    Fork,
    Forked,
    Line,
    LineEnded,
    Load,
    Loaded,
    Message,
)
from kvell.errors import KvellError, TryLater

LOAD_SECONDS = 120.0
"""The time limit for loading a tokenizer; one of 256,000 tokens takes 3 s."""
FORK_SECONDS = 5.0
TEMPLATE = "kvell.engine.sampling.grammar_process.template"

logger = logging.getLogger(__name__)


class TokenizerError(KvellError):
    """The error for a tokenizer that cannot be loaded for grammars."""


class Worker:
    """A process that compiles grammars or computes masks."""

    def __init__(self, line: Line, pid: int, template: "GrammarTemplate") -> None:
        self.line, self.pid, self.template = line, pid, template


class GrammarProcesses:
    """The template and its workers.  The template starts with the first worker, or after its end.

    Several threads use it, each with a separate worker.
    """

    def __init__(self, tokenizer_json: Callable[[], str], end_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._ends = tuple(end_token_ids)
        self._lock = threading.Lock()
        self.template: GrammarTemplate | None = None
        self._is_closed = False

    def fork(self, room_bytes: int, niceness: int = 0) -> Worker:
        """Fork a worker with the limits of :class:`.Fork`.

        :raises TokenizerError: if the model's tokenizer cannot be loaded.
        :raises TryLater: if the system cannot start a process.
        """
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unless_forked:
            unless_forked.callback(ours.close)
            with self._lock:
                template, forked = self._forked(theirs, Fork(room_bytes, niceness))
            unless_forked.pop_all()
        return Worker(Line(ours), forked.pid, template)

    def end(self, worker: Worker, why: str) -> int | None:
        """End a worker unless it has ended; return its exit code, or None if that is unknown."""
        worker.line.socket.close()
        with self._lock:
            code = None
            if worker.template is self.template:  # else it has ended with its template
                try:
                    reply = self.template.ask(End(worker.pid), FORK_SECONDS)
                    code = reply.code if isinstance(reply, Ended) else None
                except LineEnded:
                    self._drop_template()
        logger.warning("a grammar process ended (%s): %s", _described(code), why)
        return code

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._drop_template()

    def _forked(self, theirs: socket.socket, request: Fork) -> "tuple[GrammarTemplate, Forked]":
        """Fork from the template, or from a new one if it has ended or hangs."""
        for _ in range(2):
            if self._is_closed:
                break
            try:
                if self.template is None:
                    self.template = GrammarTemplate(self._tokenizer_json(), self._ends)
                reply = self.template.ask(request, FORK_SECONDS, [theirs.fileno()])
                if isinstance(reply, Forked):
                    return self.template, reply
            except (OSError, LineEnded) as error:
                logger.warning("the template of grammar processes does not answer: %s", error)
                self._drop_template()
        raise TryLater("no process for grammars could be started")

    def _drop_template(self) -> None:
        if self.template is not None:
            self.template.end()
            self.template = None


class GrammarTemplate:
    """The running template with its tokenizer; it ends with this object at the latest."""

    def __init__(self, tokenizer_json: str, end_token_ids: tuple[int, ...]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", TEMPLATE, str(theirs.fileno()), str(getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # No interrupt of a terminal.  A session of its own would make the kernel give it as
                # much time as the instance (autogroup), whatever the workers' nice values are.
                process_group=0,
            )
        self._line = Line(ours)
        self.pid = process.pid
        self.end = weakref.finalize(self, _end, process, self._line)
        loaded = self.ask(Load(tokenizer_json, end_token_ids), LOAD_SECONDS)
        if not isinstance(loaded, Loaded) or loaded.problem:
            self.end()
            raise TokenizerError(loaded.problem if isinstance(loaded, Loaded) else "no answer")
        self.vocab_size = loaded.vocab_size

    def ask(self, message: Message, seconds: float, descriptors: Sequence[int] = ()) -> Message:
        """Send a message and return the answer.

        :raises LineEnded: if there is no answer.
        """
        self._line.send(message, seconds, descriptors)
        return self._line.receive(seconds)


def _end(process: "subprocess.Popen[bytes]", line: Line) -> None:
    line.socket.close()
    process.kill()  # its workers end with it
    process.wait()


def _described(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
