"""A server with bounds of connections, and clients that speak to it over bare sockets."""

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

DEADLINE_SECONDS = 20.0
HOST = b"Host: localhost\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True)
class RunningServer:
    url: str
    pid: int
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=DEADLINE_SECONDS)

    def connect_with_little_room(self) -> socket.socket:
        """For which neither end keeps much of what this client does not read."""
        client = socket.socket()
        client.settimeout(DEADLINE_SECONDS)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        client.connect(self.address)
        return client

    def samples(self, name: str) -> dict[str, float]:
        """A metric's samples by the value of their label beside the model's name."""
        page = httpx.get(f"{self.url}/metrics").text
        return {
            next((v for k, v in one.labels.items() if k != "model_name"), ""): one.value
            for family in text_string_to_metric_families(page)
            for one in family.samples
            if one.name == f"kvell:{name}"
        }

    def rejected(self, bound: str) -> float:
        return self.samples("admission_rejections_total")[bound]

    def complaints(self) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [line for line in lines if json.loads(line)["level"] != "info"]

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.log.read_text().splitlines()]


@contextlib.contextmanager
def running_server(
    log: Path, bounds: Mapping[str, float], *instance_args: str, most_open: int | None = None
) -> Iterator[RunningServer]:
    """Start a server; end it with the block.

    :param most_open: files that it may open; also root cannot raise the limit in the process.
    """

    def limit() -> None:
        if most_open is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most_open, most_open))

    script = str(Path(__file__).with_name("bounded_server.py"))
    command = [sys.executable, script, json.dumps(bounds), *instance_args]
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            *(command,),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=limit,  # noqa: PLW1509 - nothing else runs in this process's threads
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield RunningServer(process.stdout.readline().strip(), process.pid, log)
        finally:
            process.terminate()
            process.wait(timeout=DEADLINE_SECONDS)


def request_bytes(body: Mapping[str, object], path: str = "/v1/completions") -> bytes:
    content = json.dumps({"model": "fake", "prompt": "hi", **body}).encode()
    head = b"POST %b HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (path.encode(), HOST, len(content)) + content


def rest_of(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            received += piece
    return received


def trickle(client: socket.socket, piece: bytes, seconds: float) -> bytes:
    """Send a piece at a time until the server answers or closes; all that it sent."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    client.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < deadline:
            client.sendall(piece)
            with contextlib.suppress(TimeoutError):
                received = client.recv(65536)
                client.settimeout(DEADLINE_SECONDS)
                return received + rest_of(client)
        raise AssertionError("the server let it go on")
    return b""


def is_open(client: socket.socket) -> bool:
    """Whether the server has neither sent anything nor closed the connection."""
    client.setblocking(False)
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def read_waiting(client: socket.socket) -> None:
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while client.recv(65536):
            pass
    client.settimeout(DEADLINE_SECONDS)
