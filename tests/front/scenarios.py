"""What tests of running fronts share: bounded scenarios, conditions, and a damaged line."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import numpy as np

from kvell.engine.protocol.messages import Finished
from kvell.engine.protocol.notices import (
    NO_BLOCK,
    BlocksStored,
)
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.statistics import Stats
from kvell.engine.requests.block_hashes import BlockHashes
from kvell.fleet.fleet import MemberStatus
from kvell.fleet.instance.instance_process import InstanceLine
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.supervisor import RestartPolicy, Supervisor
from kvell.front.front import Front
from kvell.front.request_log import LogEntry
from kvell.vocabulary import RequestId
from tests.engine.works import spec_of
from tests.front.seen import line_to, members_of


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
    supervisor = members_of(front)[instance_id].supervisor
    assert isinstance(supervisor, Supervisor)
    return line_to(supervisor)


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


QUICK = FrontLimits(max_waiting=1, drain_seconds=5, restart=RestartPolicy(0.01, 0.05, 3))


async def finish_of(
    front: Front, sampling: SamplingParams, prompt: "np.ndarray[tuple[int], np.dtype[np.int32]]"
) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    async for output in front.generate(spec_of(prompt, sampling)):
        tokens += output.token_ids
        if output.finished is not None:
            return tokens, output.finished
    raise AssertionError("the outputs ended without an end")


async def stats_of(front: Front) -> Stats:
    [stats] = (await front.stats()).values()
    return stats


async def stats_when(front: Front, condition: Callable[[Stats], bool]) -> Stats:
    while not condition(stats := await stats_of(front)):
        await asyncio.sleep(0.005)
    return stats


def only(front: Front) -> MemberStatus:
    [(status, _)] = front.instances()
    return status


def entry(tokens: int, max_tokens: int | None = 4, name: str = "long") -> LogEntry:
    prompt = np.arange(tokens, dtype="<i4").tobytes()
    return LogEntry(
        RequestSpec(RequestId(name), prompt, SamplingParams(max_tokens=max_tokens)), 0.0
    )


SIZE = 4


def hashes(tokens: Sequence[int], root: str = "") -> tuple[int, ...]:
    chain, text = BlockHashes(SIZE, "", root), np.asarray(tokens, np.int32)
    return tuple(chain.up_to(text[:end]) for end in range(SIZE, len(text) + 1, SIZE))


def stored(tokens: Sequence[int], root: str = "") -> BlocksStored:
    return BlocksStored(0, "full", NO_BLOCK, hashes(tokens, root), b"", SIZE)
