"""A manager that says what a test chooses, and instances of threads that answer at a door."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np

from kvell.engine.protocol.messages import HEARTBEAT_SECONDS, Command, Event, Finished, Submit
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.fleet.followed.followed_members import FollowedCluster, ManagerAddress
from kvell.fleet.followed.instance_link import InstanceLink
from kvell.fleet.manager.messages import (
    Answer,
    DrainInstance,
    FrontBeat,
    Leave,
    Roster,
    RosterEntry,
    ScaleInstances,
    ToManager,
    decode_to_manager,
    encode_message,
)
from kvell.fleet.started.front_limits import FrontLimits
from kvell.front.front import Front
from kvell.serving.fronts import FrontListener
from kvell.serving.loop import serve_fronts
from kvell.testing.instance import FakeEngine, fake_token
from kvell.wire.blocking import BlockingSocket
from kvell.wire.endpoints import endpoint_of, listen_at
from kvell.wire.frames import FrameReader, ProtocolError
from kvell.wire.greeting import Greeting
from tests.engine.works import spec_of
from tests.front.seen import members_of
from tests.wire.answering import answer_session

SECRET = b"0123456789abcdef"
FINGERPRINT = "two mixed instances"
LIMITS = FrontLimits(startup_seconds=20, drain_seconds=5, silence_seconds=5)
BEAT_SECONDS = 0.05
PROMPT = np.array([104, 105], np.int32)
Call = ScaleInstances | DrainInstance


class HeardEngine(FakeEngine):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.heard: list[Command] = []

    def handle(self, command: Command) -> list[Event]:
        self.heard.append(command)
        return super().handle(command)

    def asked(self) -> list[str]:
        return [one.request_id for one in self.heard if isinstance(one, Submit)]


class ScriptedInstance:
    """A fake engine that listens for fronts, until :meth:`end`."""

    def __init__(
        self,
        name: str,
        incarnation: int = 1,
        *,
        step_seconds: float = 0.002,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        **settings: Any,
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self.engine = HeardEngine(incarnation=incarnation, step_seconds=step_seconds, **settings)
        self.door = FrontListener("127.0.0.1", SECRET, name, incarnation)
        self._reads, self._writes = os.pipe()
        self.door.ends_with(self._reads)
        self._thread = threading.Thread(
            target=serve_fronts,
            args=(self.engine, self.door),
            kwargs={"heartbeat_seconds": heartbeat_seconds},
        )
        self._thread.start()

    def entry(self, **changes: Any) -> RosterEntry:
        """What a roster says of it while all is well."""
        role = self.name.rpartition("-")[0]
        entry = RosterEntry(
            *(self.name, role, "serving", self.incarnation, self.door.address, "10.0.0.1", 77)
        )
        return msgspec.structs.replace(entry, **changes)

    def end(self) -> None:
        """Hang up on all fronts, and listen no more."""
        if self._thread.is_alive():
            os.close(self._writes)
            self._thread.join()
            self.door.close()


class _Side(asyncio.Protocol):
    """The manager's end of the connection to a front."""

    def __init__(self, manager: "ScriptedManager") -> None:
        self._manager, self._frames = manager, FrameReader()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._manager.sides.append(self)
        self.send(self._manager.roster)

    def connection_lost(self, exc: Exception | None) -> None:
        self._manager.sides.remove(self)

    def send(self, message: Roster | Answer) -> None:
        assert self.transport is not None
        self.transport.write(encode_message(message))

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        for body in self._frames.feed(data):
            message = decode_to_manager(body)
            self._manager.heard.append(message)
            if isinstance(message, Leave):
                self.transport.close()
            elif isinstance(message, FrontBeat):
                if self._manager.tells_again:
                    self.send(self._manager.roster)
            elif (answer := self._manager.answer(message)) is not None:
                self.send(answer)


class ScriptedManager:
    """``async with ScriptedManager(…) as manager: manager.tell(…)``.

    :ivar roster: sent to each front that comes, and again behind each of its beats.
    :ivar heard: all that fronts said.
    """

    def __init__(
        self, *entries: RosterEntry, fingerprint: str = FINGERPRINT, **roster: Any
    ) -> None:
        self.roster = Roster(1, entries, **roster)
        self.heard: list[ToManager] = []
        self.fronts: list[Greeting] = []
        self.sides: list[_Side] = []
        self.tells_again = True
        self.answer: Callable[[Call], Answer | None] = lambda call: Answer(call.call)
        self._told = Greeting("manager", 1, fingerprint, 0)
        self._listener = listen_at("tcp://127.0.0.1:0")
        self.found = ManagerAddress(str(endpoint_of(self._listener)), SECRET, FINGERPRINT, "ours")

    async def __aenter__(self) -> "ScriptedManager":
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()
        self.hang_up()

    async def find(self) -> ManagerAddress:
        return self.found

    def tell(self, *entries: RosterEntry, **changes: Any) -> None:
        self.roster = msgspec.structs.replace(self.roster, instances=entries, **changes)
        for side in self.sides:
            side.send(self.roster)

    def hang_up(self) -> None:
        for side in self.sides:
            assert side.transport is not None
            side.transport.abort()

    def met(self) -> list[tuple[str, int]]:
        return [(one.instance, one.incarnation) for one in self.fronts]

    def beats(self) -> list[FrontBeat]:
        return [one for one in self.heard if isinstance(one, FrontBeat)]

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            try:
                heard = await asyncio.to_thread(self._met, BlockingSocket(sock))
            except (OSError, ProtocolError):
                sock.close()
                continue
            self.fronts.append(heard)
            sock.setblocking(False)
            await loop.connect_accepted_socket(lambda: _Side(self), sock)

    def _met(self, channel: BlockingSocket) -> Greeting:
        return answer_session(channel, self._told, SECRET, ("cluster",))[1]


@asynccontextmanager
async def joined(
    manager: ScriptedManager, limits: FrontLimits = LIMITS, **settings: Any
) -> AsyncIterator[Front]:
    cluster = FollowedCluster(settings.pop("find", manager.find), beat_seconds=BEAT_SECONDS)
    async with Front(joins=cluster, limits=limits, **settings) as front:
        yield front


@contextlib.contextmanager
def ended(*instances: ScriptedInstance) -> Iterator[None]:
    try:
        yield
    finally:
        for one in instances:
            one.end()


@asynccontextmanager
async def cluster(
    *instances: ScriptedInstance, limits: FrontLimits = LIMITS
) -> AsyncIterator[tuple[ScriptedManager, Front]]:
    with ended(*instances):
        manager = ScriptedManager(*(one.entry() for one in instances))
        async with manager, joined(manager, limits) as front:
            yield manager, front


async def finish_of(
    front: Front, max_tokens: int = 300, prompt: Any = PROMPT, request_id: str | None = None
) -> Finished:
    """Serve a prompt, check every token, and return its end."""
    tokens: list[int] = []
    sampling = SamplingParams(max_tokens=max_tokens)
    async for output in front.generate(spec_of(prompt, sampling, request_id=request_id or "")):
        tokens += output.token_ids
        if output.finished is not None:
            end = output.finished
    assert tokens == [fake_token(prompt.astype("<i4").tobytes(), n) for n in range(len(tokens))]
    assert end.reason != "length" or len(tokens) == max_tokens
    return end


def link_of(front: Front, instance_id: str) -> InstanceLink:
    link = members_of(front)[instance_id].supervisor
    assert isinstance(link, InstanceLink)
    return link


def cut(front: Front, instance_id: str) -> None:
    line = link_of(front, instance_id)._line
    assert line is not None
    line.abort()


def states(front: Front) -> dict[str, str]:
    return {one.instance_id: one.state for one, _ in front.instances()}


def in_flight(front: Front) -> dict[str, int]:
    return {one.instance_id: len(line.in_flight) for one, line in front.instances()}
