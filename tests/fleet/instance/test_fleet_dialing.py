"""Connections to instances that do not answer hold up nothing else."""

import asyncio
import socket

import pytest

from kvell.fleet.instance import instance_process as dialing
from kvell.fleet.instance.instance_process import dial
from kvell.wire.greeting import Greeting

SECRET = bytes(range(32))
FRONT = Greeting("front", 2, "", 0)
SILENT = 40
"""More than there are threads for what blocks."""


def test_instances_that_do_not_answer_take_no_thread() -> None:
    """As many as a front may know: whatever else it does in threads goes on."""

    async def dials(address: str) -> tuple[int, int]:
        waiting = [
            asyncio.create_task(dial(address, FRONT, SECRET, "commands")) for _ in range(SILENT)
        ]
        await asyncio.sleep(0)  # they have begun
        await asyncio.to_thread(str)
        ended = sum(one.done() for one in waiting)
        for one in waiting:
            one.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        return ended, sum(isinstance(one, asyncio.CancelledError) for one in results)

    with socket.create_server(("127.0.0.1", 0), backlog=2 * SILENT) as silent:
        ended, cancelled = asyncio.run(dials(f"tcp://127.0.0.1:{silent.getsockname()[1]}"))
        silent.setblocking(False)
        came = 0
        while True:
            try:
                sock, _ = silent.accept()
            except BlockingIOError:
                break
            came += 1
            sock.close()
    assert came == SILENT, "the system had taken them in, and nobody answered"
    assert (ended, cancelled) == (0, SILENT)


def test_an_instance_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "GREETING_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(OSError):
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        asyncio.run(dial(address, FRONT, SECRET, "commands"))
