"""A reader who types the commands of a page and runs its Python, in the page's order."""

import contextlib
import http.server
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

from kvell.cli import main
from kvell.cli.terminal.session import Session
from kvell.device.available import available_bytes
from tests.docs.fences import Block

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 120.0
URL = "http://127.0.0.1:8000"
SERVE = "kvell serve "
EVENTS_PORT, COLLECTOR_PORT = "5557", "4318"


@dataclass(frozen=True)
class Server:
    """A server that a page started, at a free port.

    :param log: file of its stderr.
    """

    url: str
    log: Path
    process: "subprocess.Popen[str]" = field(repr=False)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_SECONDS) == 0, self.log.read_text()


@dataclass
class Reader:
    """Runs steps of a page in one working directory.

    :param home: home and working directory, whose cache has the packaged model.
    :param names: names that Python blocks have defined.
    :param stand_ins: paths in place of models that only a hub has.
    :param collected: paths of what the trace collector received.
    """

    home: Path
    stand_ins: dict[str, Path] = field(default_factory=dict)
    names: dict[str, Any] = field(default_factory=dict)
    server: Server | None = None
    collected: list[str] = field(default_factory=list)
    _collector: http.server.HTTPServer | None = None

    @property
    def url(self) -> str:
        assert self.server is not None, "the page starts no server before this command"
        return self.server.url

    def run(self, command: str) -> str:
        """Run a command, and return what it printed; for a server, its log until it was ready."""
        command = self._here(command)
        if command.startswith(SERVE):
            return self._serve(shlex.split(command, comments=True)[1:])
        if command.startswith("kvell "):
            words = shlex.split(command, comments=True)[1:]
            asks = words[0] in ("top", "cluster")
            return self._run_kvell([*words, *(["--url", self.url] if asks else [])])
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            cwd=self.home,
            env=os.environ | {"PATH": path, "HOME": str(self.home)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _here(self, command: str) -> str:
        """Return a command with addresses and models of this machine in place of the page's."""
        if URL in command:
            command = command.replace(URL, self.url)
        for model, path in self.stand_ins.items():
            command = command.replace(model, str(path))
        if EVENTS_PORT in command:
            command = command.replace(EVENTS_PORT, str(free_port()))
        if COLLECTOR_PORT in command:
            command = command.replace(COLLECTOR_PORT, str(self._collect()))
        return command

    def _serve(self, words: list[str]) -> str:
        """Start a server in place of the one that runs, and return its log."""
        self.stop()
        if "--port" in words:
            words[words.index("--port") + 1] = "0"
        else:
            words += ["--port", "0"]
        log = self.home / "server.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvell.cli.main", *words, "--json"],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=self.home,
                env=os.environ | {"HOME": str(self.home)},
            )
        line = _stdout(process).readline()
        if not line:
            process.wait(PATIENCE_SECONDS)
            raise AssertionError(log.read_text())
        self.server = Server(json.loads(line)["url"], log, process)
        httpx.get(f"{self.url}/livez", timeout=PATIENCE_SECONDS).raise_for_status()
        return log.read_text()

    def stop(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            with _stdout(server.process):
                server.stop()

    def close(self) -> None:
        try:
            self.stop()
        finally:
            if self._collector is not None:
                self._collector.shutdown()
                self._collector.server_close()

    def _run_kvell(self, arguments: list[str]) -> str:
        """Run Kvell in this process, which has imported torch already."""
        printed = io.StringIO()
        session = Session(self.home / ".cache" / "kvell", available_bytes=available_bytes)
        with (
            contextlib.chdir(self.home),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            assert main.run(arguments, session) == 0, printed.getvalue()
        return printed.getvalue()

    def execute(self, page: str, block: Block) -> str:
        """Return what a Python block prints; later blocks see its names."""
        text = block.text.replace(URL, self.url) if URL in block.text else block.text
        printed = io.StringIO()
        with contextlib.chdir(self.home), contextlib.redirect_stdout(printed):
            exec(compile(text, f"{page}:{block.line}", "exec"), self.names)
        return printed.getvalue()

    def _collect(self) -> int:
        """Start a collector of traces, and return its port."""
        collected = self.collected

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                collected.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_request(self, code: object = "-", size: object = "-") -> None:
                """Log nothing."""

        self._collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._collector.serve_forever, daemon=True).start()
        return int(self._collector.server_address[1])


def _stdout(process: "subprocess.Popen[str]") -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_home(folder: Path, smollm2_path: Path) -> Path:
    """Make a home with the converted model in its cache, and with the repository's folders."""
    (folder / ".cache").mkdir()
    (folder / ".cache" / "kvell").symlink_to(smollm2_path.parent)
    for name in ("bench", "docs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@contextlib.contextmanager
def reading(home: Path, stand_ins: dict[str, Path] | None = None) -> Iterator[Reader]:
    """Yield a reader with its home, and end what it started."""
    reader = Reader(home, stand_ins or {})
    before = os.environ.get("HOME")
    os.environ["HOME"] = str(home)
    try:
        yield reader
    finally:
        if before is not None:
            os.environ["HOME"] = before
        reader.close()


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)
