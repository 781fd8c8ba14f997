"""What tests of running fronts share: bounded scenarios, conditions, and a damaged line."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from random import Random

from kvell.fleet.instance.instance_process import InstanceLine
from kvell.fleet.instance.supervisor import Supervisor
from kvell.front.front import Front


def run(scenario: Awaitable[None], seconds: float = 60.0) -> None:
    """Run a scenario, which fails if it takes longer."""

    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await scenario

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; whoever calls sets the bound."""
    while not condition():
        await asyncio.sleep(0.005)


def is_gone(pid: int) -> bool:
    """Whether no process has this id, not even a stopped one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def line_of(front: Front, instance_id: str) -> InstanceLine:
    """The connection to an instance that is up."""
    supervisor = front._members[instance_id].supervisor
    assert isinstance(supervisor, Supervisor)
    process = supervisor._process
    assert process is not None
    return process._line


def damage_next_bytes(line: InstanceLine, chance: Random) -> asyncio.Event:
    """Flip a bit of what the front reads next from this instance; the event says when."""
    receive, done = line.data_received, asyncio.Event()

    def damaged(data: bytes) -> None:
        line.data_received = receive  # type: ignore[method-assign]
        at = chance.randrange(len(data))
        done.set()
        receive(data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :])

    line.data_received = damaged  # type: ignore[method-assign]
    return done
