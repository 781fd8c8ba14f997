"""Liveness and readiness: a front whose instance restarts is not ready, and alive all the same."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.patience import until
from tests.server.lives import StartServer, child_of

READY, ALIVE = ("/readyz", "/health"), "/livez"


def probe(url: str, path: str) -> tuple[int, str]:
    answer = httpx.get(f"{url}{path}")
    return answer.status_code, answer.json()["status"]


@pytest.mark.long
def test_a_front_lives_while_its_instance_restarts_however_long_that_takes(
    start_server: StartServer, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    with start_server("-", "0", "--starts-once", str(started)) as (url, process):
        assert probe(url, ALIVE) == (200, "serving")
        assert [probe(url, path) for path in READY] == [(200, "serving")] * 2
        os.kill(child_of(process.pid), signal.SIGKILL)
        until(lambda: probe(url, "/readyz") == (503, "restarting"))
        assert probe(url, ALIVE) == (200, "restarting")
        started.unlink()
        until(lambda: probe(url, "/readyz") == (200, "serving"))


def test_probes_need_no_key(start_server: StartServer) -> None:
    with start_server("secret", "0") as (url, _):
        assert [probe(url, path)[0] for path in (ALIVE, *READY)] == [200] * 3
        assert httpx.get(f"{url}/v1/models").status_code == 401
