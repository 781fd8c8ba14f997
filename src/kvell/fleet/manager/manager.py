"""The manager of a cluster: keeps its instances alive, and sends its fronts the roster.

::

    made ──► starting ──► serves fronts ──last front asks, or none for long──► drains ──► ended
               │             └──a newer manager leads──► stands down: all stays as it is
               └──an instance does not start──► reports that to fronts ──► ended

Its state is soft: instances run without it, and a new manager receives what it needs from the
fronts' beats.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Self

from kvell.clock import AttendedClock, Clock, MonotonicClock
from kvell.cluster.instances import checked_counts
from kvell.cluster.routed_request import InstanceDeath
from kvell.cluster.steering.epochs import Leadership
from kvell.cluster.steering.steering import RoleChanger, Steering
from kvell.engine.protocol.messages import FRONT_LEASE_SECONDS, Event, Lead, Led
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.errors import ChangeSomething, InstanceDied, KvellError
from kvell.fleet.fleet import MemberCallbacks
from kvell.fleet.instance.instance_process import InstanceStartError, Site
from kvell.fleet.manager.front_lines import FrontLine, FrontLines
from kvell.fleet.manager.messages import (
    MANAGER,
    ROSTER_SECONDS,
    Answer,
    DrainInstance,
    Ended,
    FrontBeat,
    KeyUsesByName,
    Leave,
    Roster,
    RosterEntry,
    ScaleInstances,
    ToManager,
)
from kvell.fleet.manager.steered import SETTLING_LOOKS, FrontTable
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.members import Members, OwnMember
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.wire.doorway import Doorway
from kvell.wire.endpoints import listen_at, tcp_endpoint
from kvell.wire.frames import ProtocolError
from kvell.wire.greeting import Greeting, new_incarnation
from kvell.wire.session import check_secret

LOOK_SECONDS = 5.0
"""Time for the site to return what runs, before a cluster is ended."""


class InstanceLead:
    """The instances that obey a manager, and its withdrawal when a newer one leads.

    :param on_changed: called when the epoch rises, or a newer manager leads.
    """

    def __init__(
        self, members: Members, leadership: Leadership, on_changed: Callable[[], None]
    ) -> None:
        self._members = members
        self._leadership = leadership
        self._on_changed = on_changed
        self._obeying: set[str] = set()
        self._abandoning: asyncio.Task[None] | None = None

    def on_ready(self, instance_id: str) -> None:
        self._obeying.discard(instance_id)
        self._lead(instance_id)

    def on_led(self, instance_id: str, event: Led) -> None:
        self.on_epoch(event.epoch)
        if event.epoch == self._leadership.epoch:
            self._obeying.add(instance_id)

    def settle(self) -> None:
        serving = {member.instance_id for member in self._members if member.is_serving}
        if serving <= self._obeying:
            self._leadership.settle()

    def on_epoch(self, epoch: int) -> None:
        """Handle an epoch that another process has seen: lead on, rise above it, or stand down."""
        standing = self._leadership.on_epoch(epoch)
        if standing == "rose":
            self._obeying.clear()
            for member in self._members:
                self._lead(member.instance_id)
            self._on_changed()
        elif standing == "outranked" and self._abandoning is None:
            logger.warning("a newer manager leads (epoch %d); this one stops", epoch)
            self._abandoning = asyncio.create_task(self._members.abandon())
            self._on_changed()

    async def look_for_newer(self, site: Site) -> None:
        with contextlib.suppress(TimeoutError, KvellError):
            async with asyncio.timeout(LOOK_SECONDS):
                incarnations = await site.find()
                if self._leadership.on_incarnations(incarnations.values()) == "outranked":
                    self.on_epoch(self._leadership.outranked_by)

    async def wait_abandoned(self) -> bool:
        if self._abandoning is None:
            return False
        await self._abandoning
        return True

    def _lead(self, instance_id: str) -> None:
        with contextlib.suppress(InstanceDied):
            self._members[instance_id].supervisor.send(Lead(self._leadership.epoch))


class ManagerFrontListener:
    """A listener for the fronts of this cluster, from :meth:`open` to :meth:`close`.

    :param greeting: of the manager.  A front with other settings has another ``fingerprint``: it
        receives this greeting, and is disconnected.
    :param enters: receives each front's greeting and its non-blocking connection.
    :raises ChangeSomething: when the address cannot be bound, or the secret is too short.
    :ivar address: where it listens once it is made, like ``tcp://10.0.0.1:5000``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        greeting: Greeting,
        secret: bytes,
        enters: Callable[[Greeting, socket.socket], Awaitable[None]],
    ) -> None:
        check_secret(secret)
        self._told, self._enters = greeting, enters
        listener = listen_at(tcp_endpoint(host, port))
        self._doorway = Doorway(listener, greeting, secret, {"cluster": self._came})
        self.address = str(self._doorway.address)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._entering: set[asyncio.Future[None]] = set()

    @property
    def strangers(self) -> int:
        return self._doorway.strangers

    def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._doorway.open()

    async def close(self) -> None:
        self._loop = None
        await asyncio.to_thread(self._doorway.close)
        if self._entering:
            await asyncio.wait(self._entering)

    def _came(self, front: Greeting, sock: socket.socket) -> None:
        loop = self._loop
        if loop is None:
            sock.close()
        else:
            loop.call_soon_threadsafe(self._take, front, sock)

    def _take(self, front: Greeting, sock: socket.socket) -> None:
        if self._loop is None:
            sock.close()
            return
        if front.fingerprint != self._told.fingerprint:
            logger.warning("front %s has other settings; it was disconnected", front.instance)
            sock.close()
            return
        entering = asyncio.ensure_future(self._enters(front, sock))
        self._entering.add(entering)
        entering.add_done_callback(self._entering.discard)


def entries(
    members: Iterable[OwnMember],
    leaving: Collection[str],
    roles: Mapping[str, str],
    endings: Mapping[str, Ended],
) -> tuple[RosterEntry, ...]:
    """Return the roster entries of all instances, in the order of ``members``.

    :param leaving: instances that are being taken out of service; their state may not show it yet.
    :param roles: of instances that no longer have their first role.
    :param endings: the end of each instance's last incarnation, if one has ended.
    """
    return tuple(
        RosterEntry(
            member.instance_id,
            roles.get(member.instance_id, member.role),
            "draining"
            if member.instance_id in leaving and member.is_serving
            else member.supervisor.state,
            member.incarnation,
            member.supervisor.address,
            member.supervisor.host,
            member.supervisor.pid or 0,
            member.supervisor.restarts,
            endings.get(member.instance_id),
        )
        for member in members
    )


Order = ScaleInstances | DrainInstance


def carried_out(members: Members, order: Order) -> Answer:
    try:
        if isinstance(order, ScaleInstances):
            members.scale(checked_counts(order.instances))
        else:
            members.drain(order.instance_id)
    except ChangeSomething as error:
        return Answer(order.call, error.field, str(error.value), error.problem, error.remedy)
    except KvellError as error:
        return refuse(order, str(error))
    return Answer(order.call)


def refuse(order: Order, problem: str) -> Answer:
    return Answer(order.call, "instances", "", problem, "retry in a moment")


logger = logging.getLogger(__name__)

MOST_GAP_SECONDS = 1.0
"""Most time that counts between two looks of the manager: for longer it was stopped itself."""


class Superseded(Exception):  # noqa: N818 - no error of the cluster, which continues
    """The error of a manager that a newer one has replaced; nothing was touched.  It is no
    :class:`KvellError`: the caller must not free anything either."""


class Manager:
    """``async with Manager(…) as manager: await manager.run()``.

    :param command: an instance's command line; see :class:`.Front`.
    :param host: address of this machine for fronts, and ``port`` there; 0: a free one.
    :param fingerprint: of the settings that fronts of this cluster must have.
    :param adaptive_roles: whether prefill and decode instances change their roles by load.
    :param lonely_seconds: time that the cluster lasts without any front.
    :raises ChangeSomething: when the address cannot be bound, or the secret is too short.
    """

    def __init__(
        self,
        command: Sequence[str],
        counts: Mapping[str, int],
        limits: FrontLimits,
        site: Site,
        secret: bytes,
        *,
        pool: PoolSettings,
        host: str = "127.0.0.1",
        port: int = 0,
        fingerprint: str = "",
        adaptive_roles: bool = False,
        lonely_seconds: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        self.incarnation = new_incarnation()
        self._counts = dict(counts)
        callbacks = MemberCallbacks(
            on_ready=self._instance_ready,
            on_event=self._instance_said,
            on_lost=self._instance_lost,
            on_given_up=lambda _id: self._announce_soon(),
            on_leaving=lambda _id: self._announce_soon(),
            on_gone=self._instance_gone,
        )
        self._site = site
        self._leadership = Leadership(int(time.time()))
        self._members = Members(command, limits, site, callbacks, pool, self._leadership)
        self._lead = InstanceLead(self._members, self._leadership, self._on_epoch_changed)
        greeting = Greeting(MANAGER, self.incarnation, fingerprint, 0)
        self._door = ManagerFrontListener(host, port, greeting, secret, self._front_enters)
        # Leases must not expire during a time for which the manager was stopped.
        self._clock = AttendedClock(clock or MonotonicClock(), MOST_GAP_SECONDS)
        self._now = self._clock.now_seconds
        self._fronts = FrontTable(FRONT_LEASE_SECONDS, lonely_seconds, self._now())
        self._lines = FrontLines()
        self._endings: dict[str, Ended] = {}
        self._used: dict[str, KeyUsesByName] = {}
        roles = RoleChanger() if adaptive_roles else None
        self._steering = Steering(roles, SETTLING_LOOKS, pool.relief)
        self._failure: KvellError | None = None
        self._has_started = False
        self._waits_for = ""
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._will_announce = False
        self._woken = asyncio.Event()

    @property
    def address(self) -> str:
        """Its address for fronts, like ``tcp://10.0.0.1:5000``."""
        return self._door.address

    @property
    def is_starting(self) -> bool:
        return not self._has_started and self._failure is None

    async def __aenter__(self) -> Self:
        self._door.open()
        self._starting = asyncio.create_task(self._start())
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def run(self) -> None:
        """Serve fronts until the cluster ends; nothing of it is left then.

        :raises KvellError: when the first instances cannot be started; fronts have the reason.
        :raises Superseded: when another manager has taken the instances over.
        """
        while not self._is_over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROSTER_SECONDS):
                    await self._woken.wait()
            self._woken.clear()
            self._tick()
        await self._lead.look_for_newer(self._site)
        await self.close()
        if self._leadership.is_outranked:
            raise Superseded(f"a manager of epoch {self._leadership.outranked_by} leads")
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    def set_waits_for(self, what: str) -> None:
        """Set what starting instances wait for, for the roster; "" if they wait for nothing."""
        if what != self._waits_for:
            self._waits_for = what
            self._announce_soon()

    def roster(self) -> Roster:
        failure = self._failure
        return Roster(
            self.incarnation,
            self._entries(),
            self._fronts.role_changes,
            self.is_starting,
            "" if failure is None else str(failure),
            failure.exit_code if isinstance(failure, InstanceStartError) else None,
            self._used,
            self._waits_for,
            self._leadership.epoch,
        )

    @property
    def _is_over(self) -> bool:
        if self._closing is not None or self._leadership.is_outranked:
            return True
        if self._failure is not None and self._lines:
            return True  # and all fronts have received it
        return self._fronts.is_over(self._now())

    async def _start(self) -> None:
        try:
            await self._members.start(self._counts)
        except KvellError as error:
            logger.error("the cluster cannot start: %s", error)
            self._failure = error
        else:
            self._has_started = True
            self._fronts.is_shared |= self._members.has_adopted
            self._lead.settle()
        self._announce()
        self._woken.set()

    def _tick(self) -> None:
        if self._starting is not None and self._starting.done():
            self._starting.result()  # raises an unexpected error now
        living = self._fronts.living(self._now())
        self._lines.drop_all_but(living)
        self._used = {front: self._used[front] for front in living if front in self._used}
        if not self._is_over:
            self._lines.release_leaving()  # other fronts have joined since
        self._steer()
        if self._has_started:
            self._lead.settle()
        self._announce()

    def _steer(self) -> None:
        now = self._now()
        if not self._steering.is_due(now):
            return
        reports = {
            member.instance_id: member.report
            for member in self._members
            if member.report is not None
        }
        members = self._fronts.members(self._entries(), reports, now)
        orders = self._steering.decide(members, self._fronts.movable, now, self._leadership.epoch)
        for instance_id, role in orders.roles:
            logger.info("instance %s changes to %s", instance_id, role)
            self._fronts.change_role(instance_id, role)
            self._announce_soon()
        for front, order in self._fronts.messages(orders):
            self._lines.tell_front(front, order)

    def _entries(self) -> tuple[RosterEntry, ...]:
        staying = {member.instance_id for member in self._members.staying}
        leaving = {member.instance_id for member in self._members} - staying
        return entries(self._members, leaving, self._fronts.roles, self._endings)

    def _announce_soon(self) -> None:
        if not self._will_announce:
            self._will_announce = True
            asyncio.get_running_loop().call_soon(self._announce)

    def _announce(self) -> None:
        self._will_announce = False
        self._lines.tell_all(self.roster())

    async def _front_enters(self, front: Greeting, sock: socket.socket) -> None:
        line = FrontLine(
            front.instance,
            front.incarnation,
            self._front_came,
            self._front_said,
            self._lines.on_ended,
        )
        await asyncio.get_running_loop().create_connection(lambda: line, sock=sock)

    def _front_came(self, line: FrontLine) -> None:
        if self._closing is not None:
            line.abort()
            return
        if not self._lines.add(line):
            return
        logger.info("front %s connected", line.front)
        self._fronts.came(line.front, self._now())
        line.send(self.roster())

    def _front_said(self, line: FrontLine, message: ToManager) -> None:
        """Handle a message of a front; an error affects its line alone.

        :raises ProtocolError: when the message is invalid.
        """
        if line not in self._lines:
            return  # it left, or reconnected
        self._fronts.came(line.front, self._now())
        if isinstance(message, FrontBeat):
            self._front_beats(line.front, message)
        elif isinstance(message, Leave):
            self._front_leaves(line, message)
        elif not self._has_started or self._closing is not None:
            line.send(refuse(message, "the cluster does not serve now"))
        else:
            line.send(carried_out(self._members, message))
            self._announce_soon()

    def _front_beats(self, front: str, beat: FrontBeat) -> None:
        self._lead.on_epoch(beat.epoch)
        try:
            is_newer = self._fronts.on_beat(front, beat, self._now())
        except ChangeSomething as error:
            raise ProtocolError(str(error)) from error
        if beat.used or front in self._used:
            self._used[front] = beat.used
        if is_newer:
            self._announce_soon()

    def _front_leaves(self, line: FrontLine, leave: Leave) -> None:
        """Remove a front; one that takes the cluster along stays connected until its end."""
        logger.info("front %s left", line.front)
        self._lines.leave(line)
        self._fronts.on_left(line.front, self._now(), ends_cluster=leave.ends_cluster)
        if self._is_over:
            self._woken.set()
        else:
            line.hang_up()

    def _instance_ready(self, instance_id: str, _facts: InstanceFacts) -> None:
        self._lead.on_ready(instance_id)
        self._announce_soon()

    def _instance_said(self, instance_id: str, event: Event) -> None:
        if isinstance(event, Led):
            self._lead.on_led(instance_id, event)

    def _on_epoch_changed(self) -> None:
        if self._leadership.is_outranked:
            self._woken.set()
        else:
            self._announce_soon()

    def _instance_lost(self, instance_id: str, death: InstanceDeath) -> None:
        incarnation = self._members[instance_id].incarnation
        self._endings[instance_id] = Ended(incarnation, death.problem, death.cause)
        self._announce_soon()

    def _instance_gone(self, instance_id: str) -> None:
        self._endings.pop(instance_id, None)
        self._fronts.forget(instance_id)
        self._announce_soon()

    async def _close(self) -> None:
        await self._door.close()
        is_abandoned = await self._lead.wait_abandoned()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if not is_abandoned:
            await self._members.close()
        await self._lines.close()
