"""The instances of a front, whoever starts them: the front itself, or the manager of a cluster."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from kvell.cluster.steering.roles import RoleView
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.member import Member, MemberCallbacks


class Membership(Protocol):
    """Instances by id."""

    def __iter__(self) -> Iterator[Member]: ...

    def __len__(self) -> int: ...

    def __contains__(self, instance_id: str) -> bool: ...

    def __getitem__(self, instance_id: str) -> Member: ...

    async def start(self, counts: Mapping[str, int]) -> None:
        """Wait until the first instances are ready.

        :raises InstanceStartError: when one does not become ready.
        """
        ...

    async def close(self) -> None:
        """End them, or leave them to others."""
        ...


class JoinedMembership(Membership, Protocol):
    """Instances that a manager starts and ends."""

    async def scale(self, counts: Mapping[str, int]) -> None:
        """Let it add or drain instances until each role named has so many.

        :raises ChangeSomething: when it refuses.
        :raises TryLater: when it is away.
        """
        ...

    async def drain(self, instance_id: str) -> None:
        """Let it take an instance out of service; errors as of :meth:`scale`."""
        ...


class RoleLoad(Protocol):
    """What a front has an instance do."""

    @property
    def instance_id(self) -> str:
        """Name of the instance."""
        ...

    @property
    def role(self) -> str:
        """What the instance does now."""
        ...

    def part(self) -> RoleView | None:
        """How much it has to do of that; None if it does everything."""
        ...


class Joins(Protocol):
    """A cluster that a front joins."""

    @property
    def name(self) -> str:
        """Of the front, unlike those of all others of the cluster."""
        ...

    def members(
        self, limits: FrontLimits, told: MemberCallbacks, lines: Mapping[str, RoleLoad]
    ) -> JoinedMembership:
        """The cluster's instances, for a front that is made now.

        :param told: hears what happens to any of them.
        :param lines: of the front, which the manager is told the load of; looked at only.
        """
        ...
