"""All instances of a front: started together, added, drained, and ended."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvell.cluster.steering.epochs import Leadership
from kvell.engine.protocol.messages import (
    AskStats,
    Command,
    Event,
    Heartbeat,
    Introduce,
    ResetPrefixCache,
)
from kvell.engine.protocol.pages import LargePage, Pages
from kvell.engine.protocol.statistics import InstanceFacts, InstanceReport, Stats
from kvell.errors import ChangeSomething, InstanceDied, TryLater
from kvell.fleet.instance.death import InstanceDeath
from kvell.fleet.instance.instance_process import InstanceProcess, LaunchPlan
from kvell.fleet.instance.site import Site
from kvell.fleet.instance.supervisor import GIVEN_UP, InstanceState, Supervisor
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.fleet.started.scaling import Candidate, Scaling, scaling
from kvell.fleet.started.watch import Watch
from kvell.wire.greeting import new_incarnation


@dataclass(frozen=True)
class MemberStatus:
    """The status of an instance, for operators.

    :param instance_id: such as ``mixed-0``.
    :param role: current role; ``mixed`` prefills and decodes.
    :param state: stage between its start and its end.
    :param pid: of the process; None while there is none.
    :param host: machine that the instance runs on; "" is the front's.
    :param restarts: number of restarts so far.
    :param report: what it has reported of itself; None before it was ready.
    """

    instance_id: str
    role: str
    state: InstanceState
    pid: int | None
    restarts: int
    report: InstanceReport | None
    host: str = ""

    @property
    def pid_here(self) -> int | None:
        """The process id if it is one of this machine, where its size can be read."""
        return None if self.host else self.pid


class Handle(Protocol):
    """The connection to an instance: its :class:`.Supervisor`, or a link to an instance that the
    manager of a cluster owns."""

    @property
    def state(self) -> InstanceState:
        """The state of the instance; only one that is ``serving`` takes requests."""
        ...

    @property
    def pid(self) -> int | None:
        """The process id; None while no process is up."""
        ...

    @property
    def host(self) -> str:
        """The machine that the instance runs on; "" is the front's, or none."""
        ...

    @property
    def restarts(self) -> int:
        """Number of restarts of the instance."""
        ...

    def send(self, command: Command) -> None:
        """Queue a command for the instance.

        :raises InstanceDied: when no process is up.
        :raises ProtocolError: when the command is too long for a frame.
        """
        ...


@dataclass(frozen=True)
class MemberCallbacks:
    """The callbacks for events of an instance; the first argument is its id.

    :param on_cut: the connection ended; ``on_lost`` follows with the cause.
    :param on_role: the instance has a role from now on.
    :param on_move: the manager moves a request, the first argument, to an instance; or, if the
        number is not 0, that many sections of it.
    """

    on_ready: Callable[[str, InstanceFacts], None]
    on_event: Callable[[str, Event], None]
    on_lost: Callable[[str, InstanceDeath], None]
    on_given_up: Callable[[str], None]
    on_leaving: Callable[[str], None]
    on_gone: Callable[[str], None]
    on_cut: Callable[[str], None]
    on_role: Callable[[str, str], None]
    on_move: Callable[[str, str, int], None]


class Member:
    """An instance, as the listener of its supervisor, which the maker of both sets."""

    supervisor: Handle

    def __init__(self, instance_id: str, role: str, callbacks: MemberCallbacks) -> None:
        self.instance_id, self.role = instance_id, role
        self.incarnation = 0
        self.report: InstanceReport | None = None
        self._callbacks = callbacks
        self._stats_waiter: asyncio.Future[Stats] | None = None
        self.watch = Watch(self._send)

    @property
    def is_serving(self) -> bool:
        return self.supervisor.state == "serving"

    @property
    def is_given_up(self) -> bool:
        return self.supervisor.state in GIVEN_UP

    def next_incarnation(self) -> int:
        """Draw the incarnation of the next start; earlier ones have lower numbers."""
        self.incarnation = max(new_incarnation(), self.incarnation + 1)
        return self.incarnation

    def status(self) -> MemberStatus:
        supervisor = self.supervisor
        return MemberStatus(
            self.instance_id,
            self.role,
            supervisor.state,
            supervisor.pid,
            supervisor.restarts,
            self.report,
            supervisor.host,
        )

    async def stats(self, deadline_seconds: float, *, with_audit: bool = False) -> Stats:
        """Ask the instance for its counters; concurrent callers share one answer.

        An audit is asked for separately, after the answer that others wait for.

        :raises InstanceDied: when the instance does not serve now.
        :raises TryLater: when the instance does not answer in time.
        """
        waiter = self._stats_waiter
        if with_audit and waiter is not None:
            await asyncio.wait([waiter], timeout=deadline_seconds)
            waiter = self._stats_waiter
            if waiter is not None:
                raise TryLater("too many requests for the instance's statistics; retry in a moment")
        if waiter is None:
            self.supervisor.send(AskStats(with_audit))
            waiter = self._stats_waiter = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([waiter], timeout=deadline_seconds)
        if not done:
            raise TryLater(f"the instance gave no statistics within {deadline_seconds:g} s")
        return waiter.result()

    def forget_prefixes(self) -> bool:
        """Have the instance evict its cached prefixes before any later request; return True."""
        self.supervisor.send(ResetPrefixCache())
        return True

    def _send(self, command: Command) -> None:
        self.supervisor.send(command)

    def instance_ready(self, facts: InstanceFacts) -> None:
        self.report = InstanceReport(facts)
        self._callbacks.on_ready(self.instance_id, facts)

    def instance_said(self, event: Event) -> None:
        """Answer callers with statistics and pages, and pass all other events on."""
        if isinstance(event, Stats):
            if self._stats_waiter is not None:
                self._stats_waiter.set_result(event)
                self._stats_waiter = None
            return
        if isinstance(event, Pages | LargePage):
            self.watch.on_answer(event)
            return
        if isinstance(event, Heartbeat) and self.report is not None:
            self.report = InstanceReport(self.report.facts, event.load)
        self._callbacks.on_event(self.instance_id, event)

    def instance_lost(self, death: InstanceDeath) -> None:
        """Fail the calls that wait for an answer, and pass the loss on."""
        if self.report is not None:
            self.report = InstanceReport(self.report.facts)
        if self._stats_waiter is not None:
            self._stats_waiter.set_exception(InstanceDied(death.problem))
            self._stats_waiter.exception()  # read once: perhaps no caller waits any more
            self._stats_waiter = None
        self.watch.lost(death.problem)
        self._callbacks.on_lost(self.instance_id, death)

    def instance_given_up(self) -> None:
        self._callbacks.on_given_up(self.instance_id)


async def stats_of(
    members: Sequence[Member], deadline_seconds: float, *, with_audit: bool
) -> dict[str, Stats]:
    """Return the counters of each instance that answers in time, by id.

    :param members: at least one instance.
    :raises InstanceDied: when an instance dies meanwhile.
    :raises TryLater: when no instance answers in time.
    """
    calls = (member.stats(deadline_seconds, with_audit=with_audit) for member in members)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    counters: dict[str, Stats] = {}
    for member, answer in zip(members, answers, strict=True):
        if isinstance(answer, Stats):
            counters[member.instance_id] = answer
        elif not isinstance(answer, TryLater):
            raise answer
    if not counters:
        raise next(answer for answer in answers if isinstance(answer, TryLater))
    return counters


CLOSING = InstanceDeath("the server is shutting down", "closing")
DRAINED = InstanceDeath("the instance was taken out of service", "drained")


class OwnMember(Member):
    """An instance that this process starts."""

    supervisor: Supervisor


class Members:
    """Instances by id, in order of their start: ``mixed-0``, ``mixed-1``, …

    :param command: an instance's command line; see :class:`.Front`.
    :param site: the machines that the instances run on.
    :param pool: how they share their memory.
    :ivar has_adopted: whether instances of an earlier manager were taken over at the start.
    :param leadership: of a manager, whose orders carry its epoch; None: there is no manager.
    """

    outlives_front = False

    def __init__(
        self,
        command: Sequence[str],
        limits: FrontLimits,
        site: Site,
        callbacks: MemberCallbacks,
        pool: PoolSettings | None = None,
        leadership: Leadership | None = None,
    ) -> None:
        self._command = tuple(command)
        self._limits = limits
        self._pool = pool or PoolSettings()
        self._site = site
        self._callbacks = replace(callbacks, on_ready=self._ready)
        self._on_ready = callbacks.on_ready
        self._by_id: dict[str, OwnMember] = {}
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._starting_at_once = 1
        self._leadership = leadership
        self._is_abandoned = False
        self.has_adopted = False

    def __iter__(self) -> Iterator[OwnMember]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._by_id

    def __getitem__(self, instance_id: str) -> OwnMember:
        return self._by_id[instance_id]

    @property
    def staying(self) -> list[OwnMember]:
        return [member for member in self if member.instance_id not in self._retiring]

    async def start(self, counts: Mapping[str, int]) -> None:
        """Start the first instances together and wait until all are ready.

        Instances of an earlier manager are taken over instead, whatever the counts are;
        those that do not answer are restarted.

        :raises InstanceStartError: when one does not become ready; then all are ended.
        """
        earlier = await self._site.find()
        if self._leadership is not None:
            self._leadership.on_incarnations(earlier.values())
        if earlier:
            self.has_adopted = True
            for instance_id, incarnation in earlier.items():
                member = self._add(instance_id.rpartition("-")[0], instance_id)
                member.incarnation = incarnation
            for member in self:
                member.supervisor.start_soon()
            await asyncio.gather(*(member.supervisor.wait_settled() for member in self))
            return
        added = [self._add(role) for role, count in counts.items() for _ in range(count)]
        self._starting_at_once = len(added)
        starts = [asyncio.create_task(member.supervisor.start()) for member in added]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)
            if not self._is_abandoned:
                await self._end_all(0)
                await self._site.close()
            raise
        finally:
            self._starting_at_once = 1

    async def scale(self, counts: Mapping[str, int]) -> None:
        self.scale_now(counts)

    async def drain(self, instance_id: str) -> None:
        self.drain_now(instance_id)

    def scale_now(self, counts: Mapping[str, int]) -> None:
        """Add or drain instances until each role in ``counts`` has its number; do not wait.

        Failed instances are replaced.  Those that serve stay; of these the youngest are drained
        first.

        :raises ChangeSomething: when the host has no memory for more, or a role no instance.
        """
        plans: dict[str, Scaling] = {}
        for role, count in counts.items():
            self._check_role(role)
            candidates = [_candidate(member) for member in self.staying if member.role == role]
            plans[role] = scaling(candidates, count)
        further = sum(plan.num_new for plan in plans.values())
        promised = [
            (member.supervisor.pid, member.report.facts.memory.get("contract_bytes", 0))
            for member in self.staying
            if member.report is not None
        ]
        self._site.check_room(promised, further)
        for role, plan in plans.items():
            for member in self.staying:
                if member.instance_id in plan.leaving:
                    self._retire(member)
            added = [self._add(role) for _ in range(plan.num_new)]
            for member in added:
                member.supervisor.start_soon()

    def _check_role(self, role: str) -> None:
        roles = sorted({member.role for member in self})
        if role not in roles:
            problem = "has no instance"
            remedy = f"use {', '.join(roles)}, or start the server with it"
            raise ChangeSomething("instances", role, problem, remedy)

    def drain_now(self, instance_id: str) -> None:
        """Take an instance out of service; do not wait.

        :raises ChangeSomething: when no instance has this id, or no other one serves.
        """
        member = self._by_id.get(instance_id)
        if member is None:
            names = ", ".join(self._by_id)
            raise ChangeSomething("id", instance_id, "is not an instance", f"use one of {names}")
        if instance_id in self._retiring:
            return
        others = [other for other in self.staying if other is not member]
        if not any(other.supervisor.answers for other in others):
            raise _last_one(member, others)
        self._retire(member)

    async def close(self) -> None:
        await asyncio.gather(self._end_all(self._limits.drain_seconds), *self._retiring.values())
        if not self._is_abandoned:
            await self._site.close()

    async def abandon(self) -> None:
        self._is_abandoned = True
        await asyncio.gather(*(member.supervisor.abandon() for member in self))

    async def _end_all(self, drain_seconds: float) -> None:
        ends = (
            member.supervisor.retire(drain_seconds, CLOSING, self._epoch) for member in self.staying
        )
        await asyncio.gather(*ends)

    def _add(self, role: str, earlier: str = "") -> OwnMember:
        """Add an instance; ``earlier`` is the name of one from an earlier manager."""
        ids = (f"{role}-{number}" for number in itertools.count())
        instance_id = earlier or next(name for name in ids if name not in self._by_id)
        member = OwnMember(instance_id, role, self._callbacks)
        member.supervisor = Supervisor(
            instance_id,
            lambda: self._launch(member),
            member,
            self._limits.restart,
            self._limits.startup_seconds,
            self._limits.silence_seconds,
        )
        self._by_id[instance_id] = member
        if not earlier:
            self._site.enter(instance_id)
        return member

    async def _launch(self, member: OwnMember) -> InstanceProcess:
        process = await self._site.rejoin(member.instance_id)
        if process is not None:
            return process
        return await self._site.launch(member.instance_id, self._command, self._plan(member))

    def _plan(self, member: OwnMember) -> LaunchPlan:
        values = {
            "memory_parts": str(self._starting_at_once),
            "instance_id": member.instance_id,
            "role": member.role,
            **self._pool.values(),
        }
        if self._leadership is not None:
            member.incarnation = self._leadership.next_incarnation()
            return LaunchPlan(member.incarnation, values)
        return LaunchPlan(member.next_incarnation(), values)

    @property
    def _epoch(self) -> int:
        return 0 if self._leadership is None else self._leadership.epoch

    def _ready(self, instance_id: str, facts: InstanceFacts) -> None:
        self._introduce()
        self._on_ready(instance_id, facts)

    def _introduce(self) -> None:
        serving = [member for member in self if member.is_serving]
        addresses = {
            member.instance_id: member.report.facts.pool_address
            for member in serving
            if member.report is not None and member.report.facts.pool_address
        }
        if addresses:
            for member in serving:
                member.supervisor.send(Introduce(addresses, self._epoch))

    def _retire(self, member: OwnMember) -> None:
        self._callbacks.on_leaving(member.instance_id)
        retiring = asyncio.create_task(self._leave(member))
        self._retiring[member.instance_id] = retiring

    async def _leave(self, member: OwnMember) -> None:
        """Drain and forget an instance; others continue the requests that it does not finish."""
        await member.supervisor.retire(self._limits.drain_seconds, DRAINED, self._epoch)
        if self._is_abandoned:
            return
        del self._by_id[member.instance_id]
        del self._retiring[member.instance_id]
        self._site.leave(member.instance_id)
        self._callbacks.on_gone(member.instance_id)


def _candidate(member: OwnMember) -> Candidate:
    supervisor = member.supervisor
    return Candidate(
        member.instance_id,
        supervisor.state,
        supervisor.answers,
        supervisor.restarts_in_vain,
        supervisor.starting_seconds,
    )


def _last_one(member: OwnMember, others: Sequence[OwnMember]) -> ChangeSomething:
    """Return the error that names the instances of which one must serve before a drain."""
    problem = "cannot be drained while no other instance serves"
    if member.is_serving:
        problem = "is the last one that serves"
    remedy = "add one first: kvell cluster scale"
    if others:
        states = {other: other.supervisor.state for other in others}
        names = ", ".join(
            f"{other.instance_id} ({'does not answer' if state == 'serving' else state})"
            for other, state in states.items()
        )
        remedy = f"wait until another one serves: {names}; or {remedy}"
    return ChangeSomething("id", member.instance_id, problem, remedy)
