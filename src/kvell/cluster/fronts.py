"""The fronts of a cluster, as its manager knows them: who is there, and what they said.

A front is there while its lease lasts, which everything that it says renews.  A connection that
ends changes nothing here: the front may come back, and is gone only when its lease has ended.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvell.cluster.instances import ROLES
from kvell.errors import ChangeSomething


@dataclass
class _Front:
    """A front that is there.

    :param until_seconds: its lease ends then.
    """

    until_seconds: float
    loads: Mapping[str, int] = field(default_factory=dict)


class FrontTable:
    """Fronts by name; pure.  Times are of a clock that does not go back.

    :param lease_seconds: a front that is silent for so long is gone.
    :param lonely_seconds: a cluster without any front lasts so long.
    :param now_seconds: the start of the manager, which counts as the last sign of a front.
    :ivar is_shared: whether a front other than the first has been there, or may have been.
    :ivar roles: of instances that do not have their first one, and perhaps of others, by id.
    :ivar role_changes: how often roles have changed in this cluster, as far as it is known.
    """

    def __init__(self, lease_seconds: float, lonely_seconds: float, now_seconds: float) -> None:
        self._lease_seconds, self._lonely_seconds = lease_seconds, lonely_seconds
        self._fronts: dict[str, _Front] = {}
        self._alone_since_seconds, self._ends_now = now_seconds, False
        self._first = ""
        self.is_shared = False
        self.roles: dict[str, str] = {}
        self.role_changes = 0

    def came(self, front: str, now_seconds: float) -> None:
        """A front gave a sign of life; what it said before still holds."""
        self._expire(now_seconds)
        self._first = self._first or front
        self.is_shared |= front != self._first
        until_seconds = now_seconds + self._lease_seconds
        if front in self._fronts:
            self._fronts[front].until_seconds = until_seconds
        else:
            self._fronts[front] = _Front(until_seconds)

    def heard(
        self,
        front: str,
        loads: Mapping[str, int],
        roles: Mapping[str, str],
        role_changes: int,
        now_seconds: float,
    ) -> bool:
        """A front said what it knows; true if it knows newer roles, which hold from now on.

        So a manager that has just started learns which roles there are.

        :param loads: work that each instance has still to do for it, ≥ 0; see
            :class:`kvell.cluster.steering.roles.RoleView`.
        :raises ChangeSomething: for a load below 0 or a role that there is not; then nothing of
            it holds.
        """
        _check(loads, roles)
        self.came(front, now_seconds)
        self._fronts[front].loads = dict(loads)
        if role_changes <= self.role_changes:
            return False
        self.roles, self.role_changes = dict(roles), role_changes
        return True

    def left(self, front: str, now_seconds: float, *, ends_cluster: bool = False) -> None:
        """A front ended on purpose.

        The only one that there has ever been takes the cluster along.  Others are replaced, one
        after the other or all at once: the cluster waits for those that come in their place.

        :param ends_cluster: whether it asks for the end if it is the last.
        """
        self._expire(now_seconds)
        self._fronts.pop(front, None)
        self._alone_since_seconds = now_seconds
        self._ends_now = ends_cluster or not self.is_shared

    def change_role(self, instance_id: str, role: str) -> None:
        """An instance has another role from now on."""
        self.roles[instance_id] = role
        self.role_changes += 1

    def forget(self, instance_id: str) -> None:
        """An instance is gone; a later one of this name begins with its first role."""
        self.roles.pop(instance_id, None)

    def living(self, now_seconds: float) -> list[str]:
        """The fronts that are there, in the order that they came."""
        self._expire(now_seconds)
        return list(self._fronts)

    def loads(self, now_seconds: float) -> dict[str, int]:
        """Work that each instance has still to do, for all fronts together."""
        self._expire(now_seconds)
        total: Counter[str] = Counter()
        for front in self._fronts.values():
            total.update(front.loads)
        return dict(total)

    def is_over(self, now_seconds: float) -> bool:
        """Whether the cluster should end: its last front asked for it, or it has been alone too
        long."""
        self._expire(now_seconds)
        if self._fronts:
            return False
        alone_seconds = now_seconds - self._alone_since_seconds
        return self._ends_now or alone_seconds >= self._lonely_seconds

    def _expire(self, now_seconds: float) -> None:
        """Forget fronts that were silent for their lease."""
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
            raise ChangeSomething("loads", work, problem, "count what is still to do")
    for instance_id, role in roles.items():
        if role not in ROLES:
            problem = f"is no role of an instance, as {instance_id} has"
            raise ChangeSomething("roles", role, problem, f"use one of {', '.join(ROLES)}")
