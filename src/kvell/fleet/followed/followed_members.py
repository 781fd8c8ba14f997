"""The instances of a cluster, as one of its fronts follows them in the manager's roster."""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvell.cluster.steering.steering import OTHER
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.errors import ChangeSomething
from kvell.fleet.fleet import FrontLoad
from kvell.fleet.followed.instance_link import InstanceLink
from kvell.fleet.followed.manager_link import Find, ManagerLink
from kvell.fleet.instance.instance_process import DialedLine, InstanceStartError, dial_instance
from kvell.fleet.instance.supervisor import GIVEN_UP
from kvell.fleet.manager.messages import (
    BEAT_SECONDS,
    MOST_MOVABLE,
    FrontBeat,
    KeyUse,
    Movable,
    Pressed,
    Roster,
    RosterEntry,
)
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.members import CLOSING, DRAINED, Member, MemberCallbacks
from kvell.wire.greeting import Greeting

LINE_SECONDS = 5.0
logger = logging.getLogger(__name__)


@asynccontextmanager
async def start_lines(
    what: Callable[[], str], pause_seconds: float = LINE_SECONDS
) -> AsyncIterator[None]:
    """Log what a start waits for while the block runs, so that people see progress.

    :param what: called before each line.
    """

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


def _drawn_name() -> str:
    return f"front-{secrets.token_hex(NAME_BYTES)}"


class KeyUses(Protocol):
    """The usage of API keys, here and at other fronts."""

    def take(self) -> dict[str, KeyUse]:
        """Return the usage of each key at this front."""
        ...

    def on_uses(self, fronts: Mapping[str, Mapping[str, KeyUse]]) -> None:
        """Store the usage of each key at every other front, by front."""
        ...


@dataclass(frozen=True)
class FollowedCluster:
    """A cluster that a front joins (:class:`.Joins`), and the front's identity in it.

    :param find: finds the cluster's manager; called before each connection.
    :param name: of the front; drawn at random, so that it is unique.
    :param incarnation: of the first connection.  Each later connection, to the manager or to an
        instance, has a higher one, so that a connection that arrives late replaces none.
    :param ends_cluster: whether the cluster ends with this front if no other front is left.
    :param key_uses: shares key usage with the other fronts; None: each front counts alone.
    """

    find: Find
    name: str = field(default_factory=_drawn_name)
    incarnation: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    beat_seconds: float = BEAT_SECONDS
    key_uses: KeyUses | None = None
    ends_cluster: bool = False

    def members(
        self, limits: FrontLimits, callbacks: MemberCallbacks, lines: Mapping[str, FrontLoad]
    ) -> "FollowedMembers":
        return FollowedMembers(self, limits, callbacks, lines)


class FollowedMember(Member):
    """An instance that the manager starts."""

    supervisor: InstanceLink

    def instance_cut(self) -> None:
        self._callbacks.on_cut(self.instance_id)


class FollowedMembers:
    """A :class:`.Fleet` that follows the roster, from :meth:`start` to :meth:`close`.

    While the manager is not connected, its last roster stays valid.

    :param joins: the cluster, and the front's identity in it.
    :param lines: of the front, by instance; read-only.
    """

    outlives_front = True

    def __init__(
        self,
        joins: FollowedCluster,
        limits: FrontLimits,
        callbacks: MemberCallbacks,
        lines: Mapping[str, FrontLoad],
    ) -> None:
        self._joins, self._limits, self._lines = joins, limits, lines
        self._callbacks = replace(callbacks, on_ready=self._ready)
        self._on_ready = callbacks.on_ready
        self._by_id: dict[str, FollowedMember] = {}
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

    def __iter__(self) -> Iterator[FollowedMember]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._by_id

    def __getitem__(self, instance_id: str) -> FollowedMember:
        return self._by_id[instance_id]

    async def start(self, _counts: Mapping[str, int]) -> None:
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

    async def scale(self, counts: Mapping[str, int]) -> None:
        await self._manager.scale(counts)

    async def drain(self, instance_id: str) -> None:
        await self._manager.drain(instance_id)

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
        if self._joins.key_uses is not None:
            others = {name: used for name, used in roster.used.items() if name != self._joins.name}
            self._joins.key_uses.on_uses(others)
        is_newer = roster.role_changes >= self._role_changes
        if is_newer:
            self._role_changes = roster.role_changes
        named = {entry.instance_id: entry for entry in roster.instances if entry.state != "gone"}
        for instance_id, entry in named.items():
            is_new = instance_id not in self._by_id
            if is_new:
                self._add(entry)
            if is_new or is_newer:
                self._callbacks.on_role(instance_id, entry.role)
            if not is_new:
                self._update(self._by_id[instance_id], entry)
        if not roster.is_starting:
            for instance_id in [name for name in self._by_id if name not in named]:
                self._remove(instance_id)
        self._news.set()

    def move_ordered(self, request_id: str, target: str, num_blocks: int) -> None:
        if not self._is_closing:
            self._callbacks.on_move(request_id, target, num_blocks)

    def manager_refused(self, refusal: ChangeSomething) -> None:
        """Let :meth:`start` fail with the manager's refusal."""
        self._refusal = refusal
        self._news.set()

    def beat(self) -> FrontBeat:
        """Return the next beat to the manager."""
        lines = [self._lines[name] for name in self._by_id]
        loads = {line.instance_id: line.work for line in lines if line.role in OTHER}
        roles = {line.instance_id: line.role for line in lines}
        uses = self._joins.key_uses
        used = {} if uses is None else uses.take()
        pressed = {line.instance_id: _pressed(line) for line in lines if line.is_short}
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
        member = FollowedMember(name, name.rpartition("-")[0], self._callbacks)
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
            self._callbacks.on_leaving(name)
        if member.is_given_up and not was_given_up:
            member.instance_given_up()

    def _remove(self, instance_id: str) -> None:
        self._by_id[instance_id].supervisor.end(DRAINED)
        del self._by_id[instance_id]
        self._left = {key for key in self._left if key[0] != instance_id}
        self._callbacks.on_gone(instance_id)

    def _ready(self, instance_id: str, facts: InstanceFacts) -> None:
        self._on_ready(instance_id, facts)
        self._news.set()

    async def _dial(self, entry: RosterEntry) -> DialedLine:
        met = self._manager.met
        assert met is not None, "it named the instance"
        greeting = Greeting(self._joins.name, next(self._incarnations), met.fingerprint, 0)
        return await dial_instance(
            entry.address, greeting, met.secret, entry.instance_id, entry.incarnation
        )


def _pressed(line: FrontLoad) -> Pressed:
    youngest = line.movable()[-MOST_MOVABLE:]
    movable = tuple(Movable(request.request_id, request.size_bytes) for request in youngest)
    return Pressed(line.num_leaving, movable)
