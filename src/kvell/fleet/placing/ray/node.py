"""A node of Ray on this machine, as a child: ``ray start --block``, ended by its process id."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from kvell.errors import KvellError, TryLater
from kvell.fleet.placing.ray.node_settings import NodeSettings

START_SECONDS = 60.0
END_SECONDS = 40.0
"""Ray lets a node drain for up to 30 s."""
LOOK_SECONDS = 0.05
ADDRESS_FILE = "ray_current_cluster"
LOG_FILE = "ray.log"
LAST_BYTES = 2000
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that a process gets when its parent ends."""


class RayNode:
    """A node of Ray that runs from the start of ``with`` to its end.

    :param folder: folder for the node's files, with a short name, since Ray has sockets in it; by
        default a new one that is removed at the end.
    :param outlives: whether the node stays when the thread that started it ends.
    """

    def __init__(
        self,
        settings: NodeSettings,
        environ: Mapping[str, str],
        folder: Path | None = None,
        *,
        outlives: bool = False,
    ) -> None:
        self._outlives = outlives
        self._settings = settings
        self._environ = dict(environ)
        self._folder = folder
        self._is_own = folder is None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the child; when terminated, it ends all processes of the node."""
        assert self._child is not None
        return self._child.pid

    @property
    def folder(self) -> Path:
        assert self._folder is not None
        return self._folder

    @property
    def address(self) -> str:
        if self._settings.joins:
            return self._settings.joins
        return (self.folder / ADDRESS_FILE).read_text().strip()

    def __enter__(self) -> "RayNode":
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def start(self) -> None:
        """Start the node and wait until it reports that it runs.

        A start that fails or is interrupted leaves no process, and no folder of its own.

        :raises KvellError: when it ends before.
        :raises TryLater: when it takes too long.
        """
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End the node, all its processes, and its own folder; kill it when interrupted."""
        child, self._child = self._child, None
        try:
            if child is not None:
                _end_child(child)
        finally:
            if self._is_own and self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="kvell-ray-"))
        log = self._folder / LOG_FILE
        with log.open("wb") as output:
            self._child = subprocess.Popen(
                self._settings.words(self._folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
                # Ray must not outlive a server that is killed.
                preexec_fn=None if self._outlives else _end_with_parent,  # noqa: PLW1509
            )
        self._wait_until_up(log)

    def _wait_until_up(self, log: Path) -> None:
        assert self._child is not None
        deadline = time.monotonic() + START_SECONDS
        while not self._is_up(log):
            if self._child.poll() is not None:
                said = log.read_bytes()[-LAST_BYTES:].decode(errors="replace")
                raise KvellError(f"Ray did not start: {said.strip().splitlines()[-1:]}")
            if time.monotonic() >= deadline:
                raise TryLater(f"Ray did not start within {START_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)

    def _is_up(self, log: Path) -> bool:
        """Return whether the node's log reports it as up; a head writes its address last."""
        if b"Ray runtime started" not in log.read_bytes():
            return False
        address = self.folder / ADDRESS_FILE
        return bool(self._settings.joins) or (address.exists() and bool(address.read_text()))


def _end_child(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    try:
        child.wait(END_SECONDS)
    except BaseException as error:  # it is deaf, or the user does not want to wait
        child.kill()
        child.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    finally:
        with contextlib.suppress(ProcessLookupError):  # usually its session is empty
            os.killpg(child.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Let Linux end this process with its parent; called between fork and exec."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
