"""A front that only speaks with its manager, and a manager that runs beside a test."""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

from typing_extensions import override

from kvell.clock import VirtualClock
from kvell.fleet.instance.instance_process import InstanceProcess, LaunchPlan, Site, dial
from kvell.fleet.manager.manager import MOST_GAP_SECONDS, Manager
from kvell.fleet.manager.messages import (
    Answer,
    DrainInstance,
    MoveRequest,
    Roster,
    RosterEntry,
    ScaleInstances,
    ToManager,
    decode_to_front,
    encode_message,
)
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.host import Host
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.fleet.started.supervisor import RestartPolicy
from kvell.wire.frames import FrameReader
from kvell.wire.greeting import Greeting
from tests.front.scenarios import until

SECRET = secrets.token_bytes(32)
QUICK = FrontLimits(
    startup_seconds=20, drain_seconds=5, silence_seconds=5, restart=RestartPolicy(0.01, 0.05, 3)
)

INCARNATIONS = itertools.count(1)


class FrontClient:
    """``async with await joined(…) as front``; it keeps all that it hears."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, met: Greeting, name: str
    ) -> None:
        self.name = name
        self.met = met
        self.rosters: list[Roster] = []
        self.answers: dict[int, Answer] = {}
        self.moves: list[MoveRequest] = []
        self.is_hung_up = False
        self._calls = 0
        self._reader, self._writer = reader, writer
        self._listening = asyncio.create_task(self._listen())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._listening.cancel()
        await asyncio.wait([self._listening])
        self._writer.transport.abort()

    @property
    def roster(self) -> Roster:
        return self.rosters[-1]

    def entry(self, instance_id: str) -> RosterEntry:
        return next(one for one in self.roster.instances if one.instance_id == instance_id)

    def states(self) -> dict[str, str]:
        return {one.instance_id: one.state for one in self.roster.instances}

    def pids(self) -> list[int]:
        return [one.pid for one in self.roster.instances]

    def say(self, message: ToManager) -> None:
        self.say_bytes(encode_message(message))

    def say_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    async def scale(self, instances: dict[str, int]) -> Answer:
        self._calls += 1
        return await self._answered(ScaleInstances(self._calls, instances))

    async def drain(self, instance_id: str) -> Answer:
        self._calls += 1
        return await self._answered(DrainInstance(self._calls, instance_id))

    async def serving(self, count: int) -> None:
        """Wait until all is started, and so many instances serve, and no others are there."""
        await until(
            lambda: (
                bool(self.rosters)
                and not self.roster.is_starting
                and list(self.states().values()) == ["serving"] * count
            )
        )

    async def hung_up(self) -> None:
        await until(lambda: self.is_hung_up)

    async def _answered(self, order: ScaleInstances | DrainInstance) -> Answer:
        self.say(order)
        await until(lambda: order.call in self.answers)
        return self.answers[order.call]

    async def _listen(self) -> None:
        frames = FrameReader()
        with contextlib.suppress(ConnectionError):
            while data := await self._reader.read(1 << 16):
                for message in map(decode_to_front, frames.feed(data)):
                    if isinstance(message, Roster):
                        self.rosters.append(message)
                    elif isinstance(message, MoveRequest):
                        self.moves.append(message)
                    else:
                        assert message.call not in self.answers, "it was answered twice"
                        self.answers[message.call] = message
        self.is_hung_up = True


async def joined(
    manager: Manager,
    name: str = "front-a",
    *,
    secret: bytes = SECRET,
    fingerprint: str = "",
    incarnation: int = 0,
) -> FrontClient:
    """A front that has met the manager; its later connections have higher incarnations."""
    told = Greeting(name, incarnation or next(INCARNATIONS), fingerprint, 0)
    sock, met = await dial(manager.address, told, secret, "cluster")
    reader, writer = await asyncio.open_connection(sock=sock)
    return FrontClient(reader, writer, met, name)


@dataclass(frozen=True)
class Managed:
    """A manager, and the task that runs it."""

    manager: Manager
    running: "asyncio.Task[None]"


@asynccontextmanager
async def managed(
    command: Sequence[str],
    counts: Mapping[str, int] | None = None,
    *,
    limits: FrontLimits = QUICK,
    site: Site | None = None,
    **settings: Any,
) -> AsyncIterator[Managed]:
    """A manager that runs; an error of its own is the test's, if it has ended by then."""
    one = Manager(
        *(command, counts or {"mixed": 2}, limits, site or Host(), SECRET),
        pool=PoolSettings(),
        **settings,
    )
    async with one:
        running = asyncio.create_task(one.run())
        yield Managed(one, running)
        if running.done() and not running.cancelled():
            await running
        running.cancel()
        await asyncio.wait([running])


@asynccontextmanager
async def one_front(
    command: Sequence[str], counts: Mapping[str, int], **settings: Any
) -> AsyncIterator[tuple[Managed, FrontClient]]:
    """A manager whose instances all serve, and a front."""
    async with managed(command, counts, **settings) as one, await joined(one.manager) as front:
        await front.serving(sum(counts.values()))
        yield one, front


@asynccontextmanager
async def two_fronts(
    command: Sequence[str], counts: Mapping[str, int], **settings: Any
) -> AsyncIterator[tuple[Managed, FrontClient, FrontClient]]:
    async with (
        one_front(command, counts, **settings) as (one, front),
        await joined(one.manager, "front-b") as other,
    ):
        await other.serving(sum(counts.values()))
        yield one, front, other


class ReadClock(VirtualClock):
    num_readings = 0

    @override
    def now_seconds(self) -> float:
        self.num_readings += 1
        return super().now_seconds()


async def passes(one: Managed, clock: ReadClock, seconds: float) -> None:
    """Let time pass, in which the manager looks as often as it should."""
    end_seconds = clock.now_seconds() + seconds
    while clock.now_seconds() < end_seconds and not one.running.done():
        clock.advance(min(MOST_GAP_SECONDS, end_seconds - clock.now_seconds()))
        one.manager._woken.set()
        read = clock.num_readings
        while not one.running.done() and clock.num_readings == read:
            await asyncio.sleep(0)


class HeldSite(Host):
    """A host on which instances start when they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.lets = asyncio.Event()
        self.launched = 0

    async def launch(
        self, instance_id: str, command: Sequence[str], plan: LaunchPlan
    ) -> InstanceProcess:
        await self.lets.wait()
        self.launched += 1
        return await super().launch(instance_id, command, plan)
