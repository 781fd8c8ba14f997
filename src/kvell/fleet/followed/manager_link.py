"""Keeps a front connected to its cluster's manager, which may end and come again elsewhere.

::

    asks where it is ──► dials ──► hears rosters, says beats ──cut, silent──► pauses ──► asks …
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
from kvell.fleet.followed.manager_line import ManagerLine
from kvell.fleet.instance.dialing import dial
from kvell.fleet.instance.reaching import Pauses, reached
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
)
from kvell.wire.greeting import Greeting

SILENT_BEATS = 10
"""A manager that sent no roster for so many beats of ours, 5 s, is dialed again."""
CALL_SECONDS = 10.0
"""A call is answered within this time."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ManagerAddress:
    """Where a manager listens now.

    :param address: like ``tcp://10.0.0.1:5000``.
    :param secret: of the cluster.
    :param fingerprint: of the settings that this front expects; a manager with others is another
        cluster's.
    :param cluster: its name, for what people are told.
    """

    address: str
    secret: bytes = field(repr=False)
    fingerprint: str
    cluster: str = ""


Find = Callable[[], Awaitable[ManagerAddress]]
"""Tells where the manager is; asked before each dial.  It raises ChangeSomething if there will be
none unless the user changes something, and TryLater or OSError if that is just not known now."""


class ManagerListener(Protocol):
    """Whoever is told what the manager says; called from the event loop."""

    def roster_came(self, roster: Roster) -> None:
        """All instances as the manager sees them."""
        ...

    def move_ordered(self, request_id: str, target: str, num_blocks: int) -> None:
        """A request should go on at another instance."""
        ...

    def manager_refused(self, refusal: ChangeSomething) -> None:
        """It was not joined, and will not be unless somebody changes something."""
        ...

    def beat(self) -> FrontBeat:
        """What the manager is told now."""
        ...


class ManagerLink:
    """From :meth:`start` to :meth:`leave`.

    :param name: of the front.
    :param incarnations: of its connections, each higher than all before.
    :param beat_seconds: between two beats.
    :ivar met: the manager that was met last; None before the first.
    :ivar problem: why it is not connected; "" if that is not known.
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
    def is_connected(self) -> bool:
        """Whether the manager would hear what is said now, as far as is known."""
        return self._line is not None

    @property
    def epoch(self) -> int:
        """The highest of a manager that it has followed."""
        return self._epochs.epoch

    def start(self) -> None:
        """Connect, and connect again whenever the connection ends."""
        self._task = asyncio.create_task(self._keep())

    async def scale(self, counts: Mapping[str, int]) -> None:
        """Let the manager add or drain instances until each role named has so many.

        :raises ChangeSomething: when it refuses.
        :raises TryLater: when it is away or does not answer; then it may have done it.
        """
        number = next(self._numbers)
        await self._call(ScaleInstances(number, dict(counts)))

    async def drain(self, instance_id: str) -> None:
        """Let the manager take an instance out of service; errors as of :meth:`scale`."""
        number = next(self._numbers)
        await self._call(DrainInstance(number, instance_id))

    async def leave(self, deadline_seconds: float, *, ends_cluster: bool = False) -> None:
        """Say that this front ends, and wait until the manager has taken that in."""
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
            raise TryLater("the cluster's manager is away; come back in a moment")
        answer = asyncio.get_running_loop().create_future()
        self._calls[message.call] = answer
        self._line.send(message)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                told: Answer = await answer
        except TimeoutError as error:
            problem = f"the cluster's manager did not answer within {CALL_SECONDS:g} s"
            raise TryLater(problem) from error
        finally:
            del self._calls[message.call]
        if told.field:
            raise ChangeSomething(told.field, told.value, told.problem, told.remedy)

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

        :raises ChangeSomething: when it is another cluster's.
        :raises OSError, KvellError: when it is not there just now.
        """
        found = await self._find()
        told = Greeting(self._name, next(self._incarnations), found.fingerprint, 0)
        dialing = dial(found.address, told, found.secret, "cluster")
        sock, heard = await reached(dialing, _hang_up)
        if heard.fingerprint != found.fingerprint:
            sock.close()
            name = found.cluster or found.address
            problem = "is another cluster's: its instances were started with other options"
            remedy = "use the same options, or another name"
            raise ChangeSomething("--cluster-name", name, problem, remedy)
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(lambda: ManagerLine(self._heard), sock=sock)
        self.met, self.problem = found, ""
        return line

    async def _follow(self, line: ManagerLine) -> None:
        """Hear the manager until the connection ends."""
        self._line, self._silent_beats = line, 0
        beats = asyncio.create_task(self._beats(line))
        try:
            await line.wait_ended()
        finally:
            beats.cancel()
            line.abort()
            self._line = None
            for answer in self._calls.values():
                if not answer.done():
                    away = "the cluster's manager went away before it answered; look, and ask again"
                    answer.set_exception(TryLater(away))

    async def _beats(self, line: ManagerLine) -> None:
        """Say beats until we leave, and end a connection on which no roster comes any more.

        Beats are counted, not seconds: a front that was stopped does not take that for silence.
        """
        while not self._is_leaving:
            if self._silent_beats > SILENT_BEATS:
                line.abort("no roster came for a while")
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
        """Hang up on a manager that another has replaced, and tell it that before."""
        if self._line is not None:
            self._line.send(self._listener.beat())
            self._line.problem = "an older manager answers there"
            self._line.hang_up()

    def _away(self, problem: str) -> None:
        """Log each problem once.  Before the first connection, ``start()`` reports it."""
        if problem != self.problem and self.met is not None and not self._is_leaving:
            logger.warning("the cluster's manager is away: %s; requests go on", problem)
        self.problem = problem


def _hang_up(reached_one: tuple[socket.socket, Greeting]) -> None:
    reached_one[0].close()
