"""All instances of a front: started together, added, drained, and ended."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from typing_extensions import override

from kvell.cluster.steering.epochs import Leadership
from kvell.engine.protocol.messages import Introduce
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.errors import ChangeSomething
from kvell.fleet.fleet import (
    CLOSING,
    DRAINED,
    Fleet,
    InstanceState,
    Member,
    MemberCallbacks,
)
from kvell.fleet.instance.instance_process import InstanceProcess, LaunchPlan, Site
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.fleet.started.supervisor import Supervisor
from kvell.wire.greeting import new_incarnation

RANKS: dict[InstanceState, int] = {"serving": 0, "starting": 3, "restarting": 3, "failing": 4}
"""States by how soon an instance in them serves, soonest first; others never do."""
UNSTABLE, QUIET = 1, 2
"""Ranks of instances that serve, perhaps not for long: their restarts were in vain, or they do not
answer."""
MOST_RESTARTS = 2
"""Restarts in vain of an instance that still counts as stable."""


class Candidate(NamedTuple):
    """An instance of a role that is not being drained.

    :param answers: whether it is connected and has sent something lately, if it serves.
    :param restarts_in_vain: the number of restarts since it last computed something.
    :param starting_seconds: age of the process that is being started; 0: there is none.
    """

    instance_id: str
    state: InstanceState
    answers: bool = True
    restarts_in_vain: int = 0
    starting_seconds: float = 0.0

    @property
    def rank(self) -> int:
        if self.state == "serving" and not self.answers:
            return QUIET
        if self.state == "serving" and self.restarts_in_vain > MOST_RESTARTS:
            return UNSTABLE
        return RANKS[self.state]


class Scaling(NamedTuple):
    """A change of the number of a role's instances.

    :param leaving: instances to drain; ``num_new``: the number to add.
    """

    leaving: frozenset[str]
    num_new: int


def scaling(candidates: Sequence[Candidate], count: int) -> Scaling:
    """Return the change that leaves ``count`` instances: those that serve, or will serve soonest.

    Of instances that are alike the youngest leave.  Failed ones are replaced.

    :param candidates: the instances of the role, the oldest first.
    """
    sound = [candidate for candidate in candidates if candidate.state in RANKS]
    by_use = sorted(sound, key=lambda candidate: (candidate.rank, -candidate.starting_seconds))
    staying = {candidate.instance_id for candidate in by_use[:count]}
    leaving = {candidate.instance_id for candidate in candidates} - staying
    return Scaling(frozenset(leaving), max(0, count - len(sound)))


OwnMember = Member[Supervisor]
"""An instance that this process starts."""


class Members(Fleet[Supervisor]):
    """Instances by id, in order of their start: ``mixed-0``, ``mixed-1``, …

    :param command: an instance's command line; see :class:`.Front`.
    :ivar has_adopted: whether instances of an earlier manager were taken over at the start.
    :param leadership: of a manager, whose orders carry its epoch; None: there is no manager.
    """

    def __init__(
        self,
        command: Sequence[str],
        limits: FrontLimits,
        site: Site,
        callbacks: MemberCallbacks,
        pool: PoolSettings | None = None,
        leadership: Leadership | None = None,
    ) -> None:
        super().__init__(callbacks)
        self._command = tuple(command)
        self._limits = limits
        self._pool = pool or PoolSettings()
        self._site = site
        self._retiring: dict[str, asyncio.Task[None]] = {}
        self._starting_at_once = 1
        self._leadership = leadership
        self._is_abandoned = False
        self.has_adopted = False

    @property
    def staying(self) -> list[OwnMember]:
        return [member for member in self if member.instance_id not in self._retiring]

    @override
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
            await asyncio.gather(*(member.supervisor.settled.wait() for member in self))
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

    @override
    def scale(self, counts: Mapping[str, int]) -> asyncio.Future[None]:
        plans: dict[str, Scaling] = {}
        roles = sorted({member.role for member in self})
        for role, count in counts.items():
            if role not in roles:
                remedy = f"use {', '.join(roles)}, or start the server with it"
                raise ChangeSomething("instances", role, "has no instance", remedy)
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
        return _done()

    @override
    def drain(self, instance_id: str) -> asyncio.Future[None]:
        member = self._by_id.get(instance_id)
        if member is None:
            names = ", ".join(self._by_id)
            raise ChangeSomething("id", instance_id, "is not an instance", f"use one of {names}")
        if instance_id not in self._retiring:
            others = [other for other in self.staying if other is not member]
            if not any(other.supervisor.answers for other in others):
                raise _last_one(member, others)
            self._retire(member)
        return _done()

    @override
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
        member = OwnMember(instance_id, role, self)
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
        if self._leadership is None:  # earlier starts have lower numbers
            member.incarnation = max(new_incarnation(), member.incarnation + 1)
        else:
            member.incarnation = self._leadership.next_incarnation()
        return LaunchPlan(member.incarnation, values)

    @property
    def _epoch(self) -> int:
        return 0 if self._leadership is None else self._leadership.epoch

    @override
    def on_ready(self, instance_id: str, facts: InstanceFacts) -> None:
        """Introduce the instances that serve to each other, and pass the news on."""
        serving = [member for member in self if member.is_serving]
        addresses = {
            member.instance_id: member.report.facts.pool_address
            for member in serving
            if member.report is not None and member.report.facts.pool_address
        }
        if addresses:
            for member in serving:
                member.supervisor.send(Introduce(addresses, self._epoch))
        super().on_ready(instance_id, facts)

    def _retire(self, member: OwnMember) -> None:
        self.callbacks.on_leaving(member.instance_id)
        retiring = asyncio.create_task(self._leave(member))
        self._retiring[member.instance_id] = retiring

    async def _leave(self, member: OwnMember) -> None:
        await member.supervisor.retire(self._limits.drain_seconds, DRAINED, self._epoch)
        if self._is_abandoned:
            return
        del self._by_id[member.instance_id]
        del self._retiring[member.instance_id]
        self._site.leave(member.instance_id)
        self.callbacks.on_gone(member.instance_id)


def _done() -> asyncio.Future[None]:
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


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
