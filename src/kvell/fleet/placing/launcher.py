"""Keeps one instance on its machine: starts it as a child, watches it, and ends with it.

::

    keeper ── stdin: the secret, then nothing ──► instance
           ◄── stdout: where it listens ─────────
           ◄── stderr: its log ──────────────────
"""

import contextlib
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from kvell.cluster.steering.epochs import epoch_of
from kvell.fleet.instance.instance_process import filled_in
from kvell.fleet.placing.placement import Ended, Placed

PROGRAM = (sys.executable, "-m", "kvell.cli.main")
LAST_LINES = 8
"""Lines of stderr that are kept to say why an instance ended."""
REAP_SECONDS = 5.0
LISTEN_SECONDS = 120.0
"""A child that does not listen after this time is killed."""
KILLED = -9


class Launcher:
    """At most one child at a time; called from one thread.

    The child hears the secret on stdin, where no command line and no environment shows it.  The
    pipe stays open as long as this process lives, and a child whose pipe ends hangs up.

    :param host: address of this machine.
    :param threads: of the instance's steps.
    :param program: what runs ``kvell``'s arguments.
    """

    def __init__(
        self,
        secret: bytes,
        host: str,
        threads: int,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._secret, self._program = secret, tuple(program)
        self._values = {"host": host, "threads": str(threads)}
        self._child: subprocess.Popen[bytes] | None = None
        self._incarnation, self._address = 0, ""
        self._last = deque[str](maxlen=LAST_LINES)
        self._reader: threading.Thread | None = None

    def start(self, words: Sequence[str], incarnation: int) -> Placed:
        """Start an incarnation, and end the one before; returns once it listens, or has ended.

        The same incarnation is started once, however often that is asked for.

        :raises OSError: when the program cannot be started.
        :raises PermissionError: when a newer manager has started what is here.
        """
        if epoch_of(incarnation) < epoch_of(self._incarnation):
            raise PermissionError("a newer manager has started it")
        if self._child is not None and self._incarnation == incarnation:
            return self._placed(self._child)
        self.close()
        child = subprocess.Popen(
            [*self._program, *filled_in(words, self._values)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdin is not None
        self._child, self._incarnation, self._address = child, incarnation, ""
        self._last = deque(maxlen=LAST_LINES)
        self._reader = threading.Thread(
            target=_listen, args=(child, self._last), name="kvell-keeper", daemon=True
        )
        self._reader.start()
        with contextlib.suppress(BrokenPipeError):  # it has ended: its exit status says why
            child.stdin.write(self._secret)
            child.stdin.flush()
        self._address = _first_line(child)
        return self._placed(child)

    def runs(self) -> tuple[int, Placed] | None:
        """The incarnation that runs, and where; None if none does."""
        if self._child is None or self._child.poll() is not None:
            return None
        return self._incarnation, self._placed(self._child)

    def ended(self, incarnation: int) -> Ended | None:
        """How an incarnation ended; None while it runs.  One that is not known was killed."""
        child = self._child
        if child is None or incarnation != self._incarnation:
            return Ended(KILLED)
        code = child.poll()
        if code is None:
            return None
        assert self._reader is not None
        self._reader.join(REAP_SECONDS)  # what it said at its end is read
        return Ended(code, "".join(self._last))

    def stop(self, incarnation: int) -> None:
        """End an incarnation at once, if it is the one that runs."""
        if self._child is not None and incarnation == self._incarnation:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(REAP_SECONDS)

    def close(self) -> None:
        """End whatever runs."""
        self.stop(self._incarnation)
        for pipe in (self._child.stdin, self._child.stdout) if self._child is not None else ():
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._child = None

    def _placed(self, child: "subprocess.Popen[bytes]") -> Placed:
        return Placed(self._values["host"], child.pid, self._address)


def _first_line(child: "subprocess.Popen[bytes]") -> str:
    """What a child says first on stdout; "" if it ends before, or takes too long: it has ended
    then."""
    assert child.stdout is not None
    late = threading.Timer(LISTEN_SECONDS, child.kill)
    late.start()
    try:
        line = child.stdout.readline().decode().strip()
    finally:
        late.cancel()
    if not line:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(REAP_SECONDS)
        child.kill()
        child.wait()
    return line


def _listen(child: "subprocess.Popen[bytes]", last: deque[str]) -> None:
    """Keep the last lines of a child's stderr, and pass all of them on to this process's."""
    assert child.stderr is not None
    with child.stderr as lines:
        for line in lines:
            text = line.decode(errors="replace")
            last.append(text)
            sys.stderr.write(text)
