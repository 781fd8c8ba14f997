"""A front whose descriptors run out while its instance dies."""

import os
import resource
import signal

import httpx

from tests.patience import until
from tests.server.lives import StartServer, child_of


def instance(client: httpx.Client) -> dict[str, object]:
    [one] = client.get("/cluster").json()["instances"]
    assert isinstance(one, dict)
    return one


def test_it_comes_back_once_there_are_some_again(start_server: StartServer) -> None:
    with start_server("-", "0") as (url, process), httpx.Client(base_url=url) as client:
        assert instance(client)["state"] == "serving"  # over a connection that stays
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, hard))
        os.kill(child_of(process.pid), signal.SIGKILL)
        until(lambda: int(str(instance(client)["restarts"])) >= 2)
        assert instance(client)["state"] == "restarting", "it was not without descriptors"
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: instance(client)["state"] == "serving")
        answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4})
        assert answer.status_code == 200
