"""The connection of a front to its cluster's manager, which may restart on another machine.

::

    finds it ──► dials ──► receives rosters, sends beats ──cut, silent──► pauses ──► finds it …
"""

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvell.cluster.steering.epochs import HighestEpoch
from kvell.errors import ChangeSomething, KvellError, TryLater
from kvell.fleet.instance.instance_process import Pauses, dial, reach
from kvell.fleet.manager.messages import (
    BEAT_SECONDS,
    Answer,
    DrainInstance,
    FrontBeat,
    Leave,
    MoveRequest,
    Roster,
    ScaleInstances,
    ToFront,
    ToManager,
    decode_to_front,
    encode_message,
)
from kvell.wire.frames import MessageLine
from kvell.wire.greeting import Greeting


class ManagerLine(MessageLine[ToFront]):
    """A connection to the manager; ``hear`` receives every message."""

    def __init__(self, hear: Callable[[ToFront], None]) -> None:
        super().__init__(decode_to_front)
        self.hear = hear

    def send(self, message: ToManager) -> None:
        """Queue a message; it is dropped if the connection has ended."""
        self.send_frame(encode_message(message))


SILENT_BEATS = 10
"""A manager that sends no roster during this number of our beats, 5 s, is dialed again."""
CALL_SECONDS = 10.0
"""Time within which the manager answers a call."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ManagerAddress:
    """The address of a manager.

    :param address: like ``tcp://10.0.0.1:5000``.
    :param secret: of the cluster.
    :param fingerprint: of the settings that this front expects; a manager with another one belongs
        to another cluster.
    :param cluster: name of the cluster, for error messages.
    """

    address: str
    secret: bytes = field(repr=False)
    fingerprint: str
    cluster: str = ""


Find = Callable[[], Awaitable[ManagerAddress]]
"""Finds the manager; called before each dial.  It raises ChangeSomething if the user must change
something before there is a manager, and TryLater or OSError if the manager is not known now."""


class ManagerListener(Protocol):
    """The listener of a :class:`ManagerLink`, called from the event loop."""

    def roster_came(self, roster: Roster) -> None:
        """Apply the manager's state of all instances."""
        ...

    def move_ordered(self, request_id: str, target: str, num_blocks: int) -> None:
        """Move a request, or ``num_blocks`` of its sections, to another instance."""
        ...

    def manager_refused(self, refusal: ChangeSomething) -> None:
        """Handle a refusal, which holds until the user changes something."""
        ...

    def beat(self) -> FrontBeat:
        """Return the next beat to the manager."""
        ...


class ManagerLink:
    """A connection to the manager, from :meth:`start` to :meth:`leave`.

    :param name: of the front.
    :param incarnations: of its connections, each higher than all before.
    :ivar met: the last manager that was connected; None before the first.
    :ivar problem: why no manager is connected; "" if one is, or the reason is unknown.
    """

    def __init__(
        self,
        name: str,
        incarnations: Iterator[int],
        find: Find,
        listener: ManagerListener,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._name, self._incarnations = name, incarnations
        self._find, self._listener = find, listener
        self._beat_seconds = beat_seconds
        self._pauses = Pauses()
        self._line: ManagerLine | None = None
        self._task: asyncio.Task[None] | None = None
        self._silent_beats = 0
        self._is_leaving = False
        self._numbers = itertools.count(1)
        self._epochs = HighestEpoch()
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self.met: ManagerAddress | None = None
        self.problem = ""

    @property
    def epoch(self) -> int:
        return self._epochs.epoch

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def scale(self, counts: Mapping[str, int]) -> None:
        """Let the manager add or drain instances until each role in ``counts`` has its number.

        :raises ChangeSomething: when the manager refuses.
        :raises TryLater: when it is not connected, or does not answer and may have obeyed.
        """
        number = next(self._numbers)
        await self._call(ScaleInstances(number, dict(counts)))

    async def drain(self, instance_id: str) -> None:
        """Let the manager take an instance out of service; errors as in :meth:`scale`."""
        number = next(self._numbers)
        await self._call(DrainInstance(number, instance_id))

    async def leave(self, deadline_seconds: float, *, ends_cluster: bool = False) -> None:
        """Announce that this front ends, and wait until the manager has disconnected it."""
        self._is_leaving = True
        if self._line is not None:
            self._line.send(Leave(ends_cluster))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._line.wait_ended(), deadline_seconds)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _call(self, message: ScaleInstances | DrainInstance) -> None:
        if self._line is None:
            raise TryLater("the cluster's manager cannot be reached; retry in a moment")
        answer = asyncio.get_running_loop().create_future()
        self._calls[message.call] = answer
        self._line.send(message)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                reply: Answer = await answer
        except TimeoutError as error:
            problem = f"the cluster's manager did not answer within {CALL_SECONDS:g} s"
            raise TryLater(problem) from error
        finally:
            del self._calls[message.call]
        if reply.field:
            raise ChangeSomething(reply.field, reply.value, reply.problem, reply.remedy)

    async def _keep(self) -> None:
        while not self._is_leaving:
            await asyncio.sleep(self._pauses.next_seconds())
            try:
                line = await self._reached()
            except ChangeSomething as refusal:
                self._away(str(refusal))
                self._listener.manager_refused(refusal)
            except (OSError, KvellError) as error:
                self._away(str(error))
            else:
                await self._follow(line)
                self._away(line.problem)

    async def _reached(self) -> ManagerLine:
        """Find the manager and connect to it.

        :raises ChangeSomething: when the manager belongs to another cluster.
        :raises OSError, KvellError: when the manager cannot be reached now.
        """
        manager = await self._find()
        greeting = Greeting(self._name, next(self._incarnations), manager.fingerprint, 0)
        dialing = dial(manager.address, greeting, manager.secret, "cluster")
        sock, peer = await reach(dialing, _hang_up)
        if peer.fingerprint != manager.fingerprint:
            sock.close()
            name = manager.cluster or manager.address
            problem = "belongs to another cluster: its instances were started with other options"
            remedy = "use the same options, or another name"
            raise ChangeSomething("--cluster-name", name, problem, remedy)
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(lambda: ManagerLine(self._heard), sock=sock)
        self.met = manager
        self.problem = ""
        return line

    async def _follow(self, line: ManagerLine) -> None:
        self._line = line
        self._silent_beats = 0
        beats = asyncio.create_task(self._beats(line))
        try:
            await line.wait_ended()
        finally:
            beats.cancel()
            line.abort()
            self._line = None
            for answer in self._calls.values():
                if not answer.done():
                    away = (
                        "the connection to the cluster's manager ended before it answered; "
                        "check the state and retry"
                    )
                    answer.set_exception(TryLater(away))

    async def _beats(self, line: ManagerLine) -> None:
        """Send beats until this front leaves, and close a connection without rosters.

        Beats are counted, not seconds, so that a front that was stopped detects no false silence.
        """
        while not self._is_leaving:
            if self._silent_beats > SILENT_BEATS:
                line.abort("no roster was received for a while")
                return
            self._silent_beats += 1
            line.send(self._listener.beat())
            await asyncio.sleep(self._beat_seconds)

    def _heard(self, message: ToFront) -> None:
        if isinstance(message, Roster):
            if self._epochs.outranking(message.epoch, str(message.manager)):
                self._refuse()
                return
            self._silent_beats = 0
            self._pauses.reset()
            self._listener.roster_came(message)
        elif isinstance(message, MoveRequest):
            if not self._epochs.is_older(message.epoch):
                self._listener.move_ordered(message.request_id, message.target, message.num_blocks)
        elif message.call in self._calls and not self._calls[message.call].done():
            self._calls[message.call].set_result(message)

    def _refuse(self) -> None:
        if self._line is not None:
            self._line.send(self._listener.beat())
            self._line.problem = "an older manager answers there"
            self._line.hang_up()

    def _away(self, problem: str) -> None:
        if problem != self.problem and self.met is not None and not self._is_leaving:
            logger.warning("cannot reach the cluster's manager: %s; requests continue", problem)
        self.problem = problem


def _hang_up(connection: tuple[socket.socket, Greeting]) -> None:
    connection[0].close()
