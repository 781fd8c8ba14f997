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
    """A process that compiles grammars or computes masks.

    :param line: the connection to it.
    :param template: the template that forked it.
    """

    def __init__(self, line: Line, pid: int, template: "_Template") -> None:
        self.line, self.pid, self.template = line, pid, template

    @property
    def vocab_size(self) -> int:
        """The tokenizer's vocabulary size; many models have logits for more tokens."""
        return self.template.vocab_size


class GrammarProcesses:
    """The template and its workers.  The template starts with the first worker, or after its end.

    Several threads use it, each with a separate worker.

    :param tokenizer_json: returns the tokenizer as JSON text of the tokenizers library.
    """

    def __init__(self, tokenizer_json: Callable[[], str], end_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._ends = tuple(end_token_ids)
        self._lock = threading.Lock()
        self._template: _Template | None = None
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
        worker.line.close()
        with self._lock:
            code = None
            if worker.template is self._template:  # else it has ended with its template
                try:
                    reply = self._template.ask(End(worker.pid), FORK_SECONDS)
                    code = reply.code if isinstance(reply, Ended) else None
                except LineEnded:
                    self._drop_template()
        logger.warning("a grammar process ended (%s): %s", _described(code), why)
        return code

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._drop_template()

    def _forked(self, theirs: socket.socket, request: Fork) -> "tuple[_Template, Forked]":
        """Fork from the template, or from a new one if it has ended or hangs."""
        for _ in range(2):
            if self._is_closed:
                break
            try:
                if self._template is None:
                    self._template = _Template(self._tokenizer_json(), self._ends)
                reply = self._template.ask(request, FORK_SECONDS, [theirs.fileno()])
                if isinstance(reply, Forked):
                    return self._template, reply
            except (OSError, LineEnded) as error:
                logger.warning("the template of grammar processes does not answer: %s", error)
                self._drop_template()
        raise TryLater("no process for grammars could be started")

    def _drop_template(self) -> None:
        if self._template is not None:
            self._template.end()
            self._template = None


class _Template:
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
    line.close()
    process.kill()  # its workers end with it
    process.wait()


def _described(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
