"""The fronts of a cluster, as its manager sees them: their leases, their beats and their roles.

Each message of a front renews its lease.  The end of a connection changes nothing here: the front
may reconnect, and is removed only when its lease expires.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvell.cluster.instance_load import InstanceLoad, Movable
from kvell.cluster.instances import ROLES
from kvell.cluster.steering.steering import Orders
from kvell.engine.protocol.statistics import InstanceReport
from kvell.errors import ChangeSomething
from kvell.fleet.manager.messages import FrontBeat, MoveRequest, RosterEntry
from kvell.serving.gate import NAME_END

SETTLING_LOOKS = 2
"""Number of looks after which a front reports a move that it was ordered."""
NO_BEAT = FrontBeat()


@dataclass
class _Front:
    """A front with a valid lease, which ends at ``until_seconds``."""

    until_seconds: float
    beat: FrontBeat = NO_BEAT


class FrontTable:
    """Fronts by name; pure.  Times are of a monotonic clock.

    :param lease_seconds: a front that is silent for this long is removed.
    :param lonely_seconds: the cluster ends when it was without any front for this long.
    :param now_seconds: start of the manager, which counts as the last message of a front.
    :ivar is_shared: whether there was a front other than the first, or may have been.
    :ivar roles: of instances that no longer have their first role, and perhaps of others, by id.
    :ivar role_changes: number of role changes in this cluster, as far as it is known.
    """

    def __init__(self, lease_seconds: float, lonely_seconds: float, now_seconds: float) -> None:
        self._lease_seconds, self._lonely_seconds = lease_seconds, lonely_seconds
        self._fronts: dict[str, _Front] = {}
        self._alone_since_seconds = now_seconds
        self._ends_now = False
        self._first = ""
        self.is_shared = False
        self.roles: dict[str, str] = {}
        self.role_changes = 0

    def came(self, front: str, now_seconds: float) -> None:
        """Renew a front's lease; its last beat stays valid."""
        self._expire(now_seconds)
        self._first = self._first or front
        self.is_shared |= front != self._first
        until_seconds = now_seconds + self._lease_seconds
        if front in self._fronts:
            self._fronts[front].until_seconds = until_seconds
        else:
            self._fronts[front] = _Front(until_seconds)

    def on_beat(self, front: str, beat: FrontBeat, now_seconds: float) -> bool:
        """Store a front's beat and newer roles; return whether its roles were newer.

        A manager that has just started receives the roles in this way.

        :raises ChangeSomething: for a load below 0 or an unknown role; then nothing is stored.
        """
        _check(beat.loads, beat.roles)
        self.came(front, now_seconds)
        self._fronts[front].beat = beat
        if beat.role_changes <= self.role_changes:
            return False
        self.roles = dict(beat.roles)
        self.role_changes = beat.role_changes
        return True

    def on_left(self, front: str, now_seconds: float, *, ends_cluster: bool = False) -> None:
        """Remove a front that ended on purpose.

        The cluster ends with the only front that it has ever had.  Several fronts may be replaced,
        one after the other or all together, so the cluster waits for their successors.

        :param ends_cluster: whether the cluster should end if no other front is left.
        """
        self._expire(now_seconds)
        self._fronts.pop(front, None)
        self._alone_since_seconds = now_seconds
        self._ends_now = ends_cluster or not self.is_shared

    def change_role(self, instance_id: str, role: str) -> None:
        self.roles[instance_id] = role
        self.role_changes += 1

    def forget(self, instance_id: str) -> None:
        """Forget an instance; a later one of this name begins with its first role."""
        self.roles.pop(instance_id, None)

    def living(self, now_seconds: float) -> list[str]:
        self._expire(now_seconds)
        return list(self._fronts)

    def loads(self, now_seconds: float) -> dict[str, int]:
        self._expire(now_seconds)
        total: Counter[str] = Counter()
        for front in self._fronts.values():
            total.update(front.beat.loads)
        return dict(total)

    def members(
        self,
        entries: Iterable[RosterEntry],
        reports: Mapping[str, InstanceReport],
        now_seconds: float,
    ) -> list[InstanceLoad]:
        """Return the instances that serve, in the order of the entries, with the work for all
        fronts together.

        While one has sent no heartbeat, its memory counts as neither short nor free.
        """
        loads = self.loads(now_seconds)
        leaving: Counter[str] = Counter()
        coming: Counter[str] = Counter()
        for front in self._fronts.values():
            coming.update(front.beat.coming)
            leaving.update({name: asks.leaving for name, asks in front.beat.pressed.items()})
        members: list[InstanceLoad] = []
        for entry in entries:
            name = entry.instance_id
            if entry.state != "serving" or name not in reports:
                continue
            member = InstanceLoad(name, entry.role)
            member.fronts_work = loads.get(name, 0)
            member.fronts_leaving, member.fronts_coming = leaving[name], coming[name]
            member.on_report(reports[name])
            members.append(member)
        return members

    def movable(self, instance_id: str) -> list[Movable]:
        """Return the requests of all fronts that could leave an instance, the youngest last.

        Clocks of fronts differ, so the smallest counts as the youngest.
        """
        pressed = [front.beat.pressed.get(instance_id) for front in self._fronts.values()]
        movable = [request for each in pressed if each is not None for request in each.movable]
        return sorted(movable, key=lambda request: (-request.size_bytes, request.request_id))

    def messages(self, orders: Orders) -> list[tuple[str, MoveRequest]]:
        """Return the messages of moves to the fronts whose requests move."""
        messages = []
        for move in orders.moves:
            owner, _, _ = move.request_id.rpartition(NAME_END)
            for name, front in self._fronts.items():
                pressed = front.beat.pressed.get(move.source)
                movable = () if pressed is None else pressed.movable
                if name == owner or any(
                    request.request_id == move.request_id for request in movable
                ):
                    order = MoveRequest(orders.epoch, move.request_id, move.target, move.num_blocks)
                    messages.append((name, order))
        return messages

    def is_over(self, now_seconds: float) -> bool:
        self._expire(now_seconds)
        if self._fronts:
            return False
        alone_seconds = now_seconds - self._alone_since_seconds
        return self._ends_now or alone_seconds >= self._lonely_seconds

    def _expire(self, now_seconds: float) -> None:
        for name, front in list(self._fronts.items()):
            if front.until_seconds <= now_seconds:
                del self._fronts[name]
                if front.until_seconds > self._alone_since_seconds:
                    self._alone_since_seconds = front.until_seconds
                    self._ends_now = False


def _check(loads: Mapping[str, int], roles: Mapping[str, str]) -> None:
    for instance_id, work in loads.items():
        if work < 0:
            problem = f"is below 0 for {instance_id}"
            raise ChangeSomething("loads", work, problem, "report the remaining work, 0 or more")
    for instance_id, role in roles.items():
        if role not in ROLES:
            problem = f"is not a role of an instance, as {instance_id} has"
            raise ChangeSomething("roles", role, problem, f"use one of {', '.join(ROLES)}")
