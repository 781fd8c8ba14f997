"""The instances of a cluster as one of its fronts has them: those that the roster names."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvell.engine.protocol.messages import Ready
from kvell.errors import ChangeSomething
from kvell.fleet.fleet import RoleLoad
from kvell.fleet.followed.instance_link import InstanceLink
from kvell.fleet.followed.manager_link import Find, ManagerLink
from kvell.fleet.followed.start_lines import start_lines
from kvell.fleet.instance.dialing import DialedLine, dial_instance
from kvell.fleet.instance.instance_process import InstanceStartError
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
from kvell.fleet.started.member import Member, MemberCallbacks
from kvell.fleet.started.members import CLOSING, DRAINED
from kvell.wire.greeting import Greeting

NAME_BYTES = 4
LEAVE_SECONDS = 30.0
"""The manager hangs up on a front that leaves within this time, and that of draining."""


def _drawn_name() -> str:
    return f"front-{secrets.token_hex(NAME_BYTES)}"


class KeyUses(Protocol):
    """What keys use, here and at other fronts."""

    def told(self) -> dict[str, KeyUse]:
        """What each key used here."""
        ...

    def heard(self, fronts: Mapping[str, Mapping[str, KeyUse]]) -> None:
        """What each key used at every other front, by front."""
        ...


@dataclass(frozen=True)
class FollowedCluster:
    """A cluster that a front joins (:class:`.Joins`), and how it knows that front.

    :param find: tells where the cluster's manager is; asked whenever it is connected to.
    :param name: drawn, so that no other front has the same.
    :param incarnation: of its first connection; each further one, to whomever, has a higher one, so
        that one that comes late replaces none.
    :param beat_seconds: between two signs of life to the manager.
    :param ends_cluster: whether the cluster ends with this front if no other is there then.
    :param key_uses: shares what keys use with the other fronts; None: each front counts alone.
    """

    find: Find
    name: str = field(default_factory=_drawn_name)
    incarnation: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    beat_seconds: float = BEAT_SECONDS
    key_uses: KeyUses | None = None
    ends_cluster: bool = False

    def members(
        self, limits: FrontLimits, callbacks: MemberCallbacks, lines: Mapping[str, RoleLoad]
    ) -> "FollowedMembers":
        """See :class:`.Joins`."""
        return FollowedMembers(self, limits, callbacks, lines)


class FollowedMember(Member):
    """An instance that the manager starts."""

    supervisor: InstanceLink

    def instance_cut(self) -> None:
        """Pass it on."""
        self._callbacks.on_cut(self.instance_id)


class FollowedMembers:
    """A :class:`.Fleet`: follows the roster from :meth:`start` to :meth:`close`.

    While the manager is away, the roster that it sent last holds.

    :param joins: which cluster, and who the front is.
    :param callbacks: called when something happens to any instance.
    :param lines: of the front, by instance; looked at only.
    """

    outlives_front = True

    def __init__(
        self,
        joins: FollowedCluster,
        limits: FrontLimits,
        callbacks: MemberCallbacks,
        lines: Mapping[str, RoleLoad],
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
        """Join, and wait until all instances that serve are reached; the manager knows how many.

        :raises ChangeSomething: when the cluster cannot be joined as things are.
        :raises InstanceStartError: when it does not start, or is not reached.
        """
        self._manager.start()
        try:
            await self._join()
        except BaseException:
            await self.close()
            raise

    async def scale(self, counts: Mapping[str, int]) -> None:
        """See :class:`.Fleet`."""
        await self._manager.scale(counts)

    async def drain(self, instance_id: str) -> None:
        """See :class:`.Fleet`."""
        await self._manager.drain(instance_id)

    async def close(self) -> None:
        """Hang up on the instances, which cancel what is left there, and leave the cluster."""
        self._is_closing = True
        for member in self:
            member.supervisor.end(CLOSING)
        await self._manager.leave(
            self._limits.drain_seconds + LEAVE_SECONDS, ends_cluster=self._joins.ends_cluster
        )
        await asyncio.gather(*(one.supervisor.ended() for one in self))

    def roster_came(self, roster: Roster) -> None:
        """See :class:`.ManagerListener`.

        A manager that is still starting may not have found every instance yet: what it does not
        name stays.
        """
        if self._is_closing:
            return
        self._roster = roster
        if self._joins.key_uses is not None:
            others = {name: used for name, used in roster.used.items() if name != self._joins.name}
            self._joins.key_uses.heard(others)
        is_newer = roster.role_changes >= self._role_changes
        if is_newer:
            self._role_changes = roster.role_changes
        named = {one.instance_id: one for one in roster.instances if one.state != "gone"}
        for instance_id, entry in named.items():
            is_new = instance_id not in self._by_id
            if is_new:
                self._add(entry)
            if is_new or is_newer:
                self._callbacks.on_role(instance_id, entry.role)
            if not is_new:
                self._update(self._by_id[instance_id], entry)
        if not roster.is_starting:
            for instance_id in [one for one in self._by_id if one not in named]:
                self._remove(instance_id)
        self._news.set()

    def move_ordered(self, request_id: str, target: str, num_blocks: int) -> None:
        """See :class:`.ManagerListener`."""
        if not self._is_closing:
            self._callbacks.on_move(request_id, target, num_blocks)

    def manager_refused(self, refusal: ChangeSomething) -> None:
        """See :class:`.ManagerListener`."""
        self._refusal = refusal
        self._news.set()

    def beat(self) -> FrontBeat:
        """See :class:`.ManagerListener`."""
        lines = [self._lines[one] for one in self._by_id]
        parts = [part for line in lines if (part := line.part()) is not None]
        loads = {one.instance_id: one.work for one in parts}
        roles = {one.instance_id: one.role for one in lines}
        uses = self._joins.key_uses
        used = {} if uses is None else uses.told()
        pressed = {one.instance_id: _pressed(one) for one in lines if one.is_short}
        coming = {one.instance_id: len(one.coming) for one in lines if one.coming}
        return FrontBeat(
            *(loads, roles, self._role_changes, used, self._manager.epoch), pressed, coming
        )

    async def _join(self) -> None:
        limit = self._limits.startup_seconds
        loop = asyncio.get_running_loop()
        try:
            async with start_lines(self._awaited), asyncio.timeout(limit) as deadline:
                while not self._has_joined():
                    if self._roster is not None and self._roster.is_starting:
                        deadline.reschedule(loop.time() + limit)  # the manager has its own
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            raise InstanceStartError(f"{self._missing()} within {limit:g} s") from error

    def _has_joined(self) -> bool:
        """Whether an instance is reached, and all that serve are.

        :raises ChangeSomething, InstanceStartError: when that cannot come.
        """
        roster = self._roster
        if roster is None:
            if self._refusal is not None:
                raise self._refusal
            return False
        if roster.failed:
            raise InstanceStartError(roster.failed, roster.exit_code)
        states = {one.instance_id: one.state for one in roster.instances}
        if states and set(states.values()) <= GIVEN_UP:
            raise InstanceStartError("no instance of the cluster can be started")
        serving = [self._by_id[name] for name, state in states.items() if state == "serving"]
        return not roster.is_starting and bool(serving) and all(one.is_serving for one in serving)

    def _awaited(self) -> str:
        """Return what this front waits for, for a line of the log."""
        roster = self._roster
        if roster is None:
            why = f" ({self._manager.problem})" if self._manager.problem else ""
            return f"the cluster's manager{why}"
        starting = [one.instance_id for one in roster.instances if one.state == "starting"]
        unreached = [one.instance_id for one in self if not one.is_serving]
        names = f"{', '.join(starting or unreached) or 'an instance'} to be ready"
        return f"{names}, which need {roster.waits_for}" if roster.waits_for else names

    def _missing(self) -> str:
        """What the front waits for."""
        if self._roster is None:
            why = f" ({self._manager.problem})" if self._manager.problem else ""
            return f"the cluster's manager was not reached{why}"
        missing = [one for one in self if not one.is_serving]
        names = ", ".join(one.instance_id for one in missing) or "any instance"
        why = ", ".join({one.supervisor.problem for one in missing} - {""})
        return f"this front did not reach {names}{f' ({why})' if why else ''}"

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
        self._left = {one for one in self._left if one[0] != instance_id}
        self._callbacks.on_gone(instance_id)

    def _ready(self, instance_id: str, ready: Ready) -> None:
        self._on_ready(instance_id, ready)
        self._news.set()

    async def _dial(self, entry: RosterEntry) -> DialedLine:
        met = self._manager.met
        assert met is not None, "it named the instance"
        told = Greeting(self._joins.name, next(self._incarnations), met.fingerprint, 0)
        return await dial_instance(
            entry.address, told, met.secret, entry.instance_id, entry.incarnation
        )


def _pressed(line: RoleLoad) -> Pressed:
    """What the manager is told of an instance that is short of memory."""
    youngest = line.movable()[-MOST_MOVABLE:]
    movable = tuple(Movable(one.request_id, one.size_bytes) for one in youngest)
    return Pressed(line.memory().leaving, movable)
