"""Launch one instance on its machine as a child, watch it, and end with it.

::

    launcher ── stdin: the secret, then nothing ──► instance
             ◄── stdout: where it listens ─────────
             ◄── stderr: its log ──────────────────
"""

import contextlib
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvell.cluster.steering.epochs import epoch_of
from kvell.fleet.instance.instance_process import filled_in
from kvell.fleet.placing.placement import IncarnationEnd, InstancePlace

PROGRAM = (sys.executable, "-m", "kvell.cli.main")
LAST_LINES = 8
"""Lines of stderr that are kept to say why an instance ended."""
REAP_SECONDS = 5.0
LISTEN_SECONDS = 120.0
"""A child that does not listen after this time is killed."""
KILLED = -9
STOPPED_KEPT = 64
"""Incarnations that are remembered because they were stopped."""


class Launcher:
    """Launcher of one child at a time; may be called from several threads.

    A start waits until its child listens.  Every other call returns immediately, and a stop ends
    the wait.

    The child reads the secret on stdin, where no command line and no environment shows it.  The
    pipe stays open as long as this process lives, and a child whose pipe ends hangs up.

    :param program: what runs ``kvell``'s arguments.
    """

    def __init__(
        self,
        secret: bytes,
        host: str,
        threads: int,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._secret = secret
        self._program = tuple(program)
        self._host = host
        self._values = {"host": host, "threads": str(threads)}
        self._child: _Child | None = None
        self._stopped = deque[int](maxlen=STOPPED_KEPT)
        self._lock = threading.Lock()

    def start(self, words: Sequence[str], incarnation: int) -> InstancePlace:
        """Start an incarnation and end the one before; return once the new one listens or ended.

        The same incarnation is started once, however many calls there are, and never after it was
        stopped.

        :raises OSError: when the program cannot be started.
        :raises PermissionError: when a newer manager has started what is here.
        """
        with self._lock:
            if incarnation in self._stopped:
                return InstancePlace(self._host, 0, "")
            child = self._child
            if child is not None and epoch_of(incarnation) < epoch_of(child.incarnation):
                raise PermissionError("a newer manager has started the processes here")
            if child is None or child.incarnation != incarnation:
                self._end()
                command = [*self._program, *filled_in(words, self._values)]
                child = self._child = _Child(command, incarnation, self._secret)
        return child.place(self._host, child.wait_address())

    def runs(self) -> tuple[int, InstancePlace] | None:
        child = self._child
        if child is None or not child.address or child.process.poll() is not None:
            return None
        return child.incarnation, child.place(self._host, child.address)

    def end_of(self, incarnation: int) -> IncarnationEnd | None:
        child = self._child
        if child is None or incarnation != child.incarnation:
            return IncarnationEnd(KILLED)
        code = child.process.poll()
        return None if code is None else IncarnationEnd(code, child.last_words())

    def stop(self, incarnation: int) -> None:
        """Kill an incarnation, if it is the one that runs.

        A later start of it, or one that this call overtakes, starts nothing.
        """
        self._stopped.append(incarnation)
        with self._lock:
            child = self._child
        if child is not None and child.incarnation == incarnation:
            child.kill()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.hang_up()
        self._child = None


class _Child:
    """The process of one incarnation.

    :ivar address: where it listens; "" while it does not.
    :raises OSError: when the program cannot be started.
    """

    def __init__(self, command: Sequence[str], incarnation: int, secret: bytes) -> None:
        self.incarnation = incarnation
        self.address = ""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._last = deque[str](maxlen=LAST_LINES)
        self._has_spoken = threading.Event()
        self._readers = [self._in_thread(self._read_log), self._in_thread(self._read_address)]
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its exit status says why
            self.process.stdin.write(secret)
            self.process.stdin.flush()

    def place(self, host: str, address: str) -> InstancePlace:
        return InstancePlace(host, self.process.pid, address)

    def wait_address(self) -> str:
        """Wait until the process listens; return "" if it has ended instead."""
        self._has_spoken.wait()
        return self.address

    def last_words(self) -> str:
        self._readers[0].join(REAP_SECONDS)
        return "".join(self._last)

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(REAP_SECONDS)
        self._has_spoken.set()  # a process of its own may still hold the pipe

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _in_thread(self, read: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=read, name="kvell-launcher", daemon=True)
        thread.start()
        return thread

    def _read_address(self) -> None:
        """Read the first line of stdout; end a process that closes it, or takes too long."""
        assert self.process.stdout is not None
        late = threading.Timer(LISTEN_SECONDS, self.process.kill)
        late.daemon = True
        late.start()
        with self.process.stdout as lines:
            line = lines.readline().decode(errors="replace").strip()
            late.cancel()
            if not line:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(REAP_SECONDS)
                self.process.kill()
                self.process.wait()
            self.address = line
            self._has_spoken.set()
            for _ in lines:
                pass  # the process must not wait for room in this pipe

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace")
                self._last.append(text)
                sys.stderr.write(text)
