"""The instances of a cluster, as one of its fronts follows them in the manager's roster.

The connection to the manager, which may restart on another machine::

    finds it ──► dials ──► receives rosters, sends beats ──cut, silent──► pauses ──► finds it …
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.steering.epochs import HighestEpoch
from kvell.cluster.steering.steering import OTHER
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.errors import ChangeSomething, KvellError, TryLater
from kvell.fleet.fleet import CLOSING, DRAINED, GIVEN_UP, Fleet, Member, MemberCallbacks
from kvell.fleet.followed.instance_link import InstanceLink
from kvell.fleet.instance.instance_process import (
    DialedLine,
    InstanceStartError,
    Pauses,
    dial,
    dial_instance,
    reach,
)
from kvell.fleet.manager.messages import (
    BEAT_SECONDS,
    MOST_MOVABLE,
    Answer,
    DrainInstance,
    FrontBeat,
    KeyUse,
    Leave,
    MoveRequest,
    Pressed,
    Roster,
    RosterEntry,
    ScaleInstances,
    ToFront,
    ToManager,
    decode_to_front,
    encode_message,
)
from kvell.fleet.started.front_limits import FrontLimits
from kvell.wire.frames import MessageLine
from kvell.wire.greeting import Greeting

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class ManagerAddress:
    """The address of a manager.

    :param address: like ``tcp://10.0.0.1:5000``.
    :param fingerprint: of the settings that this front expects; a manager with another one belongs
        to another cluster.
    """

    address: str
    secret: bytes = field(repr=False)
    fingerprint: str
    cluster: str = ""


Find = Callable[[], Awaitable[ManagerAddress]]
"""Finds the manager; called before each dial.  It raises ChangeSomething if the user must change
something before there is a manager, and TryLater or OSError if the manager is not known now."""


class ManagerLink:
    """A connection to the manager, from :meth:`start` to :meth:`leave`.

    :param incarnations: of its connections, each higher than all before.
    :ivar met: the last manager that was connected; None before the first.
    :ivar problem: why no manager is connected; "" if one is, or the reason is unknown.
    """

    def __init__(
        self,
        name: str,
        incarnations: Iterator[int],
        find: Find,
        fleet: "FollowedMembers",
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._name, self._incarnations = name, incarnations
        self._find, self._fleet = find, fleet
        self._beat_seconds = beat_seconds
        self._pauses = Pauses()
        self._line: ManagerLine | None = None
        self._task: asyncio.Task[None] | None = None
        self._silent_beats = 0
        self._is_leaving = False
        self.numbers = itertools.count(1)
        self._epochs = HighestEpoch()
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self.met: ManagerAddress | None = None
        self.problem = ""

    @property
    def epoch(self) -> int:
        return self._epochs.epoch

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def leave(self, deadline_seconds: float, *, ends_cluster: bool = False) -> None:
        self._is_leaving = True
        if self._line is not None:
            self._line.send(Leave(ends_cluster))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._line.ended.wait(), deadline_seconds)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def call(self, message: ScaleInstances | DrainInstance) -> None:
        """Wait until the manager has carried out an order.

        :raises ChangeSomething: when the manager refuses.
        :raises TryLater: when it is not connected, or does not answer and may have obeyed.
        """
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
                self._fleet.manager_refused(refusal)
            except (OSError, KvellError) as error:
                self._away(str(error))
            else:
                await self._follow(line)
                self._away(line.problem)

    async def _reached(self) -> ManagerLine:
        manager = await self._find()
        greeting = Greeting(self._name, next(self._incarnations), manager.fingerprint, 0)
        dialing = dial(manager.address, greeting, manager.secret, "cluster")
        sock, peer = await reach(dialing, lambda connection: connection[0].close())
        if peer.fingerprint != manager.fingerprint:
            sock.close()
            name = manager.cluster or manager.address
            problem = "belongs to another cluster: its instances were started with other options"
            remedy = "use the same options, or another name"
            raise ChangeSomething("--cluster-name", name, problem, remedy)
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(lambda: ManagerLine(self._on_message), sock=sock)
        self.met = manager
        self.problem = ""
        return line

    async def _follow(self, line: ManagerLine) -> None:
        self._line = line
        self._silent_beats = 0
        beats = asyncio.create_task(self._beats(line))
        try:
            await line.ended.wait()
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
            line.send(self._fleet.front_beat())
            await asyncio.sleep(self._beat_seconds)

    def _on_message(self, message: ToFront) -> None:
        if isinstance(message, Roster):
            if self._epochs.outranking(message.epoch, str(message.manager)):
                if self._line is not None:
                    self._line.send(self._fleet.front_beat())
                    self._line.problem = "an older manager answers there"
                    self._line.hang_up()
                return
            self._silent_beats = 0
            self._pauses.reset()
            self._fleet.roster_came(message)
        elif isinstance(message, MoveRequest):
            if message.epoch >= self._epochs.epoch:
                self._fleet.move_ordered(message.request_id, message.target, message.num_blocks)
        elif message.call in self._calls and not self._calls[message.call].done():
            self._calls[message.call].set_result(message)

    def _away(self, problem: str) -> None:
        if problem != self.problem and self.met is not None and not self._is_leaving:
            logger.warning("cannot reach the cluster's manager: %s; requests continue", problem)
        self.problem = problem


LINE_SECONDS = 5.0


@contextlib.asynccontextmanager
async def start_lines(
    what: Callable[[], str], pause_seconds: float = LINE_SECONDS
) -> AsyncIterator[None]:
    """Log what a start waits for while the block runs, so that people see progress."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(pause_seconds)
            logger.info("waiting for %s", what())

    lines = asyncio.create_task(repeat())
    try:
        yield
    finally:
        lines.cancel()


NAME_BYTES = 4
LEAVE_SECONDS = 30.0
"""Time for the manager to disconnect a front that leaves, in addition to the drain time."""


@dataclass(frozen=True)
class FollowedCluster:
    """A cluster that a front joins, and the front's identity in it.

    :param find: finds the cluster's manager; called before each connection.
    :param incarnation: of the first connection.  Each later connection, to the manager or to an
        instance, has a higher one, so that a connection that arrives late replaces none.
    :param ends_cluster: whether the cluster ends with this front if no other front is left.
    :param take_key_uses: returns the usage of each key at this front, by default none.
    :param on_key_uses: receives the usage of each key at every other front, by front.
    """

    find: Find
    name: str = field(default_factory=lambda: f"front-{secrets.token_hex(NAME_BYTES)}")
    incarnation: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    beat_seconds: float = BEAT_SECONDS
    take_key_uses: Callable[[], dict[str, KeyUse]] = dict
    on_key_uses: Callable[[Mapping[str, Mapping[str, KeyUse]]], object] = dict
    ends_cluster: bool = False

    def members(
        self, limits: FrontLimits, callbacks: MemberCallbacks, lines: Mapping[str, InstanceLoad]
    ) -> "FollowedMembers":
        return FollowedMembers(self, limits, callbacks, lines)


FollowedMember = Member[InstanceLink]
"""An instance that the manager starts."""


class FollowedMembers(Fleet[InstanceLink]):
    """A fleet that follows the roster, from :meth:`start` to :meth:`close`.

    While the manager is not connected, its last roster stays valid.

    :param lines: of the front, by instance; read-only.
    """

    outlives_front = True

    def __init__(
        self,
        joins: FollowedCluster,
        limits: FrontLimits,
        callbacks: MemberCallbacks,
        lines: Mapping[str, InstanceLoad],
    ) -> None:
        super().__init__(callbacks)
        self._joins, self._limits, self._lines = joins, limits, lines
        self._incarnations = itertools.count(joins.incarnation)
        self._manager = ManagerLink(
            joins.name, self._incarnations, joins.find, self, joins.beat_seconds
        )
        self._roster: Roster | None = None
        self._refusal: ChangeSomething | None = None
        self._role_changes = 0
        self._left: set[tuple[str, int]] = set()
        self._news = asyncio.Event()
        self._is_closing = False

    @override
    async def start(self, counts: Mapping[str, int]) -> None:
        """Join, and wait until every serving instance is reached; the manager has its own counts.

        :raises ChangeSomething: when the cluster cannot be joined without a change by the user.
        :raises InstanceStartError: when the cluster does not start, or is not reached.
        """
        self._manager.start()
        try:
            await self._join()
        except BaseException:
            await self.close()
            raise

    @override
    def scale(self, counts: Mapping[str, int]) -> asyncio.Future[None]:
        order = ScaleInstances(next(self._manager.numbers), dict(counts))
        return asyncio.ensure_future(self._manager.call(order))

    @override
    def drain(self, instance_id: str) -> asyncio.Future[None]:
        order = DrainInstance(next(self._manager.numbers), instance_id)
        return asyncio.ensure_future(self._manager.call(order))

    @override
    async def close(self) -> None:
        """Disconnect from the instances, which cancel this front's requests, and leave."""
        self._is_closing = True
        for member in self:
            member.supervisor.end(CLOSING)
        await self._manager.leave(
            self._limits.drain_seconds + LEAVE_SECONDS, ends_cluster=self._joins.ends_cluster
        )
        await asyncio.gather(*(member.supervisor.wait_ended() for member in self))

    def roster_came(self, roster: Roster) -> None:
        """Apply a roster.

        A manager that is still starting may not have found every instance yet, so instances that
        its roster does not name stay.
        """
        if self._is_closing:
            return
        self._roster = roster
        others = {name: used for name, used in roster.used.items() if name != self._joins.name}
        self._joins.on_key_uses(others)
        is_newer = roster.role_changes >= self._role_changes
        if is_newer:
            self._role_changes = roster.role_changes
        named = {entry.instance_id: entry for entry in roster.instances if entry.state != "gone"}
        for instance_id, entry in named.items():
            is_new = instance_id not in self._by_id
            if is_new:
                self._add(entry)
            if is_new or is_newer:
                self.callbacks.on_role(instance_id, entry.role)
            if not is_new:
                self._update(self._by_id[instance_id], entry)
        if not roster.is_starting:
            for instance_id in [name for name in self._by_id if name not in named]:
                self._remove(instance_id)
        self._news.set()

    def move_ordered(self, request_id: str, target: str, num_blocks: int) -> None:
        if not self._is_closing:
            self.callbacks.on_move(request_id, target, num_blocks)

    def manager_refused(self, refusal: ChangeSomething) -> None:
        self._refusal = refusal
        self._news.set()

    def front_beat(self) -> FrontBeat:
        lines = [self._lines[name] for name in self._by_id]
        loads = {line.instance_id: line.work for line in lines if line.role in OTHER}
        roles = {line.instance_id: line.role for line in lines}
        used = self._joins.take_key_uses()
        pressed = {
            line.instance_id: Pressed(line.num_leaving, tuple(line.movable()[-MOST_MOVABLE:]))
            for line in lines
            if line.is_short
        }
        coming = {line.instance_id: line.num_coming for line in lines if line.num_coming}
        return FrontBeat(
            loads, roles, self._role_changes, used, self._manager.epoch, pressed, coming
        )

    async def _join(self) -> None:
        limit = self._limits.startup_seconds
        loop = asyncio.get_running_loop()
        try:
            async with start_lines(self._awaited), asyncio.timeout(limit) as deadline:
                while not self._has_joined():
                    if self._roster is not None and self._roster.is_starting:
                        deadline.reschedule(loop.time() + limit)  # the manager has its own limit
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            raise InstanceStartError(f"{self._missing()} within {limit:g} s") from error

    def _has_joined(self) -> bool:
        """Return whether at least one instance serves, and this front has reached all that do.

        :raises ChangeSomething, InstanceStartError: when the cluster cannot be joined.
        """
        roster = self._roster
        if roster is None:
            if self._refusal is not None:
                raise self._refusal
            return False
        if roster.failed:
            raise InstanceStartError(roster.failed, roster.exit_code)
        states = {entry.instance_id: entry.state for entry in roster.instances}
        if states and set(states.values()) <= GIVEN_UP:
            raise InstanceStartError("no instance of the cluster can be started")
        serving = [self._by_id[name] for name, state in states.items() if state == "serving"]
        return (
            not roster.is_starting
            and bool(serving)
            and all(member.is_serving for member in serving)
        )

    def _awaited(self) -> str:
        roster = self._roster
        if roster is None:
            why = f" ({self._manager.problem})" if self._manager.problem else ""
            return f"the cluster's manager{why}"
        starting = [entry.instance_id for entry in roster.instances if entry.state == "starting"]
        unreached = [member.instance_id for member in self if not member.is_serving]
        names = f"{', '.join(starting or unreached) or 'an instance'} to be ready"
        return f"{names}, which need {roster.waits_for}" if roster.waits_for else names

    def _missing(self) -> str:
        if self._roster is None:
            why = f" ({self._manager.problem})" if self._manager.problem else ""
            return f"cannot reach the cluster's manager{why}"
        missing = [member for member in self if not member.is_serving]
        names = ", ".join(member.instance_id for member in missing) or "any instance"
        why = ", ".join({member.supervisor.problem for member in missing} - {""})
        return f"this front cannot reach {names}{f' ({why})' if why else ''}"

    def _add(self, entry: RosterEntry) -> None:
        name = entry.instance_id
        member = FollowedMember(name, name.rpartition("-")[0], self)
        limits = self._limits
        member.supervisor = InstanceLink(
            entry, self._dial, member, limits.startup_seconds, limits.silence_seconds
        )
        self._by_id[name] = member
        member.supervisor.start()

    def _update(self, member: FollowedMember, entry: RosterEntry) -> None:
        link, name = member.supervisor, member.instance_id
        was_given_up = member.is_given_up
        link.update(entry)
        if entry.state == "draining" and (name, entry.incarnation) not in self._left:
            self._left.add((name, entry.incarnation))
            self.callbacks.on_leaving(name)
        if member.is_given_up and not was_given_up:
            member.instance_given_up()

    def _remove(self, instance_id: str) -> None:
        self._by_id[instance_id].supervisor.end(DRAINED)
        del self._by_id[instance_id]
        self._left = {key for key in self._left if key[0] != instance_id}
        self.callbacks.on_gone(instance_id)

    @override
    def on_ready(self, instance_id: str, facts: InstanceFacts) -> None:
        super().on_ready(instance_id, facts)
        self._news.set()

    async def _dial(self, entry: RosterEntry) -> DialedLine:
        met = self._manager.met
        assert met is not None, "it named the instance"
        greeting = Greeting(self._joins.name, next(self._incarnations), met.fingerprint, 0)
        return await dial_instance(
            entry.address, greeting, met.secret, entry.instance_id, entry.incarnation
        )
