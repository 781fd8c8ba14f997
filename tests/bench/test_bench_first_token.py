"""The bench of starts: what it reads from /proc, and its figures."""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from bench.engine.first_token import (
    Moment,
    cpu_seconds,
    figures,
    memory_parts,
    moment,
    table_of,
    wait_for_words,
)
from bench.side_by_side.processes import descendants

MIB = 1 << 20
SMAPS = """55e1-7ffd ---p 00000000 00:00 0    [rollup]
Rss:              204800 kB
Pss:              102400 kB
Pss_Anon:          51200 kB
Pss_Shmem:          1024 kB
"""


def test_a_processs_time_is_its_own_and_that_of_children_that_ended() -> None:
    fields = ["S", *["0"] * 10, "100", "20", "30", "5", "0"]
    ticks = os.sysconf("SC_CLK_TCK")
    assert cpu_seconds("42 (a (b) c) " + " ".join(fields)) == pytest.approx(155 / ticks)


def test_memory_is_read_in_bytes() -> None:
    parts = memory_parts(SMAPS)
    assert (parts["Rss"], parts["Pss_Anon"], parts["Pss_Shmem"]) == (200 * MIB, 50 * MIB, MIB)


def test_a_moment_counts_children_that_run() -> None:
    """A child that holds memory and has computed."""
    inner = "x = bytearray(32 << 20); import time; print('held', flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        seen = moment(process, started)
        for child in descendants(process.pid):
            os.kill(child, signal.SIGKILL)
        process.kill()
    assert seen.own_bytes > 32 * MIB
    assert seen.resident_bytes > seen.own_bytes
    assert seen.wall_seconds > 0


def test_figures_are_the_best_the_middle_and_the_most() -> None:
    seen = [Moment(wall, cpu, own, 2 * own) for wall, cpu, own in ((5, 3, 7), (4, 9, 8), (6, 4, 1))]
    found = figures(seen)
    assert (found["wall_best_seconds"], found["wall_median_seconds"]) == (4, 5)
    assert (found["cpu_best_seconds"], found["cpu_median_seconds"]) == (3, 4)
    assert (found["own_bytes"], found["resident_bytes"]) == (8, 16)
    assert table_of({"serve, ready": found}).row_count == 1


class Streaming(BaseHTTPRequestHandler):
    said: tuple[str, ...] = ()
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "small"}]}'
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["model"] == "small"
        self.send_response(200)
        self.end_headers()
        for line in self.said:
            self.wfile.write(line.encode())

    def log_message(self, *_args: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (
            ('data: {"choices": [{"text": ""}]}\n\n', 'data: {"choices": [{"text": "Hi"}]}\n\n'),
            "",
        ),
        (('data: {"choices": [{"text": ""}]}\n\n', "data: [DONE]\n\n"), "without words"),
        (('{"error": {"message": "no such model"}}\n',), "no such model"),
    ],
)
def test_it_waits_for_words(said: tuple[str, ...], complaint: str) -> None:
    handler = type("Saying", (Streaming,), {"said": said})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        if complaint:
            with pytest.raises(SystemExit, match=complaint):
                wait_for_words(url)
        else:
            wait_for_words(url)
        server.shutdown()
