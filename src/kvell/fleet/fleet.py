"""The fleet as a front sees it: its own instances, or those of a cluster's manager."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from kvell.cluster.steering.relief import MemoryView, MovableView
from kvell.cluster.steering.roles import RoleView
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.member import Member, MemberCallbacks
from kvell.vocabulary import RequestId


class Fleet(Protocol):
    """The instances of a front by id."""

    outlives_front: bool
    """Whether the instances go on when the front ends."""

    def __iter__(self) -> Iterator[Member]: ...

    def __len__(self) -> int: ...

    def __contains__(self, instance_id: str) -> bool: ...

    def __getitem__(self, instance_id: str) -> Member: ...

    async def start(self, counts: Mapping[str, int]) -> None:
        """Wait until the first instances are ready.

        :raises InstanceStartError: when one does not become ready.
        """
        ...

    async def scale(self, counts: Mapping[str, int]) -> None:
        """Add or drain instances until each role named has so many; they start or end later.

        :raises ChangeSomething: when there is no memory for more, or the manager refuses.
        :raises TryLater: when the cluster's manager is away.
        """
        ...

    async def drain(self, instance_id: str) -> None:
        """Take an instance out of service.

        :raises ChangeSomething: when there is none of this id, or it is the last that serves.
        :raises TryLater: when the cluster's manager is away.
        """
        ...

    async def close(self) -> None:
        """End the instances, or leave them to others."""
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

    @property
    def is_short(self) -> bool:
        """Whether it is short of memory, by what it said last."""
        ...

    @property
    def coming(self) -> Collection[RequestId]:
        """Requests that others have and that will go on there."""
        ...

    def memory(self) -> MemoryView:
        """What it said of its memory, with what is on its way from it and to it."""
        ...

    def movable(self) -> Sequence[MovableView]:
        """Requests that could leave it; the oldest first."""
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
        self, limits: FrontLimits, callbacks: MemberCallbacks, lines: Mapping[str, RoleLoad]
    ) -> Fleet:
        """The cluster's instances, for a front that is made now.

        :param callbacks: called when something happens to any of them.
        :param lines: of the front, which the manager is told the load of; looked at only.
        """
        ...
