"""Pauses between dials, and dials that nobody waits for any more."""

import asyncio

import pytest

from kvell.fleet.instance.instance_process import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    Pauses,
    hang_up_after,
    reach,
)
from tests.front.scenarios import until


def test_pauses_grow_up_to_a_bound_and_begin_anew() -> None:
    pauses = Pauses()
    for _ in range(2):
        waited = [pauses.next_seconds() for _ in range(50)]
        assert waited[:3] == [0.0, FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS]
        assert waited == sorted(waited)
        assert waited[-1] == LONGEST_PAUSE_SECONDS
        pauses.reset()


class Dialed:
    """Somebody who answers when the test says so."""

    def __init__(self, error: OSError | None = None) -> None:
        self.answers, self.error = asyncio.Event(), error
        self.hung_up: list[str] = []

    async def dial(self) -> str:
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return "a line"


async def test_what_is_reached_is_not_hung_up() -> None:
    dialed = Dialed()
    dialed.answers.set()
    assert await reach(dialed.dial(), dialed.hung_up.append) == "a line"
    assert not dialed.hung_up


async def test_errors_of_a_dial_are_the_callers() -> None:
    dialed = Dialed(ConnectionRefusedError("nobody"))
    dialed.answers.set()
    with pytest.raises(ConnectionRefusedError):
        await reach(dialed.dial(), dialed.hung_up.append)


@pytest.mark.parametrize("error", [None, ConnectionRefusedError("nobody")])
async def test_what_comes_too_late_is_hung_up(error: OSError | None) -> None:
    dialed = Dialed(error)
    waiting = asyncio.create_task(reach(dialed.dial(), dialed.hung_up.append))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not dialed.hung_up
    dialed.answers.set()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await until(lambda: all(one.done() for one in others))
    await asyncio.sleep(0)
    assert dialed.hung_up == ([] if error else ["a line"])


async def test_a_task_that_was_stopped_reaches_nothing() -> None:
    dialed = Dialed()
    task = asyncio.create_task(dialed.dial())
    hang_up_after(task, dialed.hung_up.append)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert not dialed.hung_up
