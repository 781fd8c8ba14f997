"""A first start that goes wrong, while others serve: it is told, and it is not the last."""

import asyncio
from collections.abc import Iterator

import pytest

from kvell.engine.protocol.messages import Event, Ready
from kvell.server.instance.death import InstanceDeath
from kvell.server.instance.instance_process import InstanceProcess, InstanceStartError
from kvell.server.instance.restart import RestartPolicy
from kvell.server.instance.supervisor import USER_MUST_CHANGE, Supervisor
from kvell.wire.frames import ProtocolError

PROBLEMS = (
    ProtocolError("malformed event"),
    InstanceStartError("it ended"),
    InstanceStartError("it ended", 1),
)


class Listening:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.given_up = 0

    def instance_ready(self, ready: Ready) -> None:
        raise AssertionError("it never is")

    def instance_said(self, event: Event) -> None:
        raise AssertionError("it never says anything")

    def instance_lost(self, death: InstanceDeath) -> None:
        raise AssertionError("it was never there")

    def instance_given_up(self) -> None:
        self.given_up += 1


def supervised(problems: Iterator[Exception], attempts: int) -> tuple[Supervisor, Listening]:
    async def launch() -> InstanceProcess:
        raise next(problems)

    listening = Listening()
    policy = RestartPolicy(0.0, 0.0, attempts)
    return Supervisor("mixed-0", launch, listening, policy, 1.0, 1.0), listening


@pytest.mark.parametrize("problem", PROBLEMS, ids=["protocol", "lost", "crash"])
def test_a_first_start_that_goes_wrong_is_tried_again(problem: Exception) -> None:
    async def scenario() -> None:
        supervisor, listening = supervised(iter([problem] * 4), attempts=3)
        supervisor.start_soon()
        async with asyncio.timeout(10):
            await supervisor.settled()  # whoever waits for all does not wait for this one
            while not listening.given_up:
                await asyncio.sleep(0)
        assert (supervisor.state, supervisor.restarts, listening.given_up) == ("failed", 3, 1)

    asyncio.run(scenario())


def test_what_the_user_must_change_is_not_tried_again() -> None:
    async def scenario() -> None:
        problem = InstanceStartError("--memory is too little", USER_MUST_CHANGE)
        supervisor, listening = supervised(iter([problem]), attempts=3)
        supervisor.start_soon()
        async with asyncio.timeout(10):
            await supervisor.settled()
        assert (supervisor.state, supervisor.restarts, listening.given_up) == ("failed", 0, 1)

    asyncio.run(scenario())
