"""A whole cluster for fault tests: nodes, a manager, fronts, and wires between all of them."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvell.engine.protocol.statistics import Stats
from kvell.fleet.followed.followed_members import FollowedCluster, FollowedMembers, ManagerAddress
from kvell.fleet.manager.messages import Roster
from kvell.fleet.started.front_limits import FrontLimits
from kvell.front.front import Front
from tests.async_engine.handover_faults import is_at_rest
from tests.fleet.faults.instances import FAKES, Instances
from tests.fleet.faults.load import Load, unexplained
from tests.fleet.faults.machines.machines import Machines
from tests.fleet.faults.managing import LEASE_SECONDS, LONELY_SECONDS, ManagedCluster
from tests.fleet.faults.wires import Wires
from tests.fleet.placing.ray_machines import is_gone
from tests.front.scenarios import until
from tests.front.seen import members_of

NODES, FRONTS = 2, 2


@dataclass
class JoinedFront:
    """A front of the test's process, with its name and its load."""

    front: Front
    name: str
    load: Load

    @property
    def roster(self) -> Roster:
        members = members_of(self.front)
        assert isinstance(members, FollowedMembers) and members._roster is not None
        return members._roster

    def is_served_by(self, instance_id: str) -> bool:
        told = {status.instance_id: status.state for status, _ in self.front.instances()}
        return told.get(instance_id) == "serving"


@dataclass
class Cluster:
    """All parts of it.

    :ivar instances: what they are.
    :ivar fronts: those of the test's process, which survive.
    """

    secret: bytes
    wires: Wires
    machines: Machines
    managed: ManagedCluster
    instances: Instances = FAKES
    fronts: list[JoinedFront] = field(default_factory=list)
    _files_of_new: tuple[int, int] = (0, 0)

    async def find(self) -> ManagerAddress:
        return ManagerAddress(self.managed.address, self.secret, "")

    async def goes_on(self, tokens: int = 300) -> None:
        """Wait until every front has got so many more tokens."""
        await asyncio.gather(*(one.load.goes_on(tokens) for one in self.fronts))

    def is_whole(self) -> bool:
        newest = self.machines.incarnations()
        for one in self.fronts:
            told = [status for status, _ in one.front.instances()]
            named = one.roster.instances
            if one.roster.is_starting or not self.wires.between(one.name, "manager"):
                return False
            if {each.state for each in told} | {each.state for each in named} != {"serving"}:
                return False
            if {each.instance_id: each.incarnation for each in named} != newest:
                return False
            if {
                each.instance_id: each.report.facts.incarnation for each in told if each.report
            } != newest:
                return False
        return (
            len(self.wires.between("manager-*", "*"))
            == len(newest)
            == sum(self.instances.counts.values())
        )

    async def whole(self) -> None:
        await until(self.is_whole)

    def files(self) -> tuple[int, int]:
        pids = [self.machines.pid_of(name) for name in self.machines.incarnations()]
        return open_files(self.managed.pid), max(map(open_files, pids))

    def note_files(self) -> None:
        """All are connected, and nothing has happened yet: hardly more may be open later."""
        self._files_of_new = self.files()

    def has_leaked(self) -> bool:
        others = len(self.machines.incarnations()) - 1
        more = 0, self.instances.links * others
        least = zip(self._files_of_new, more, strict=True)
        return any(now > sum(new) for now, new in zip(self.files(), least, strict=True))

    async def cancelled(self) -> int:
        return sum(one.finished.get("cancelled", 0) for one in (await self.stats()).values())

    async def stats(self) -> dict[str, Stats]:
        told = await self.fronts[0].front.stats(with_audit=True)
        assert {name: one.problems for name, one in told.items() if one.problems} == {}
        return told

    async def rests(self) -> None:
        """Let all requests end, and wait until nobody knows of any."""
        await asyncio.gather(*(one.load.stop() for one in self.fronts))
        await self.whole()
        for one in self.fronts:
            assert (one.front.waiting, one.front.in_flight) == (0, 0)
            for _, line in one.front.instances():
                assert not line.in_flight
                assert (line.own_prompt_tokens, line.outstanding_output_tokens) == (0, 0)
        while not await self._holds_nothing():
            await asyncio.sleep(0.01)
        await until(lambda: all(self._knows_of_nothing(one.front) for one in self.fronts))
        await until(lambda: not self.has_leaked() and not self.machines.strays())

    def judge(self) -> str:
        """Check what all requests got; a line that says it."""
        lines = []
        for one in self.fronts:
            load = one.load
            assert not load.wrong, load.wrong[:3]
            assert load.accepted == sum(load.ends.values())
            assert unexplained(load.refusals, self.instances.refusals) == []
            assert unexplained(load.turned_away, self.instances.barred) == []
            lines.append(
                f"{load.accepted} requests, {load.tokens} tokens, {dict(load.ends)}, again"
                f" {load.again}, refused {dict(load.refusals)}, away {dict(load.turned_away)}"
            )
        return "; ".join(lines)

    async def _holds_nothing(self) -> bool:
        told = await self.stats()
        return set(told) == set(self.machines.incarnations()) and all(
            map(is_at_rest, told.values())
        )

    def _knows_of_nothing(self, front: Front) -> bool:
        return all(
            status.report is not None
            and status.report.load is not None
            and (status.report.load.running, status.report.load.waiting) == (0, 0)
            and (line.running_requests, line.outstanding_prompt_tokens) == (0, 0)
            for status, line in front.instances()
        )


@asynccontextmanager
async def cluster(
    folder: Path,
    seed: int,
    times: tuple[float, float] = (LEASE_SECONDS, LONELY_SECONDS),
    instances: Instances = FAKES,
) -> AsyncIterator[Cluster]:
    """A cluster under load; afterwards nothing of it may be left.

    :param times: see :class:`ManagedCluster`.
    """
    before, tasks = open_files(), asyncio.all_tasks()
    secret = secrets.token_bytes(32)
    limits = FrontLimits(
        startup_seconds=instances.startup_seconds,
        drain_seconds=10,
        silence_seconds=instances.silence_seconds,
    )
    program = instances.program
    async with Wires() as wires, Machines(wires, secret, folder, NODES, program) as machines:
        managed = ManagedCluster(wires, secret, machines.socket, instances)
        managed.times = times
        one: Cluster | None = None
        await managed.start()
        try:
            one = Cluster(secret, wires, machines, managed, instances)
            async with AsyncExitStack() as stack:
                for number in range(FRONTS):
                    joins = FollowedCluster(one.find, ends_cluster=True)
                    front = await stack.enter_async_context(Front(joins=joins, limits=limits))
                    load = Load(front, f"{seed} {number}", instances.streams, instances.draw)
                    await stack.enter_async_context(load)
                    one.fronts.append(JoinedFront(front, joins.name, load))
                await one.whole()
                one.note_files()
                await one.goes_on()
                yield one
                await one.rests()
            assert await one.managed.ended() == 0
        finally:
            await managed.kill()
            if one is not None:
                await one.managed.kill()
    assert machines.was_closed, "the last front left, and the cluster did not end"
    await until(lambda: all(is_gone(pid) for pid in [*machines.pids, *managed.pids]))
    await until(lambda: open_files() <= before and asyncio.all_tasks() <= tasks)


def open_files(pid: int | str = "self") -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
