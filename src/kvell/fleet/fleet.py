"""The protocol of a fleet: a front's own instances, or those of a cluster's manager."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from kvell.cluster.steering.relief import MovableView
from kvell.cluster.steering.steering import RoleWork
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.members import Member, MemberCallbacks


class Fleet(Protocol):
    """The instances of a front, by id."""

    outlives_front: bool
    """Whether the instances keep running after the front has ended."""

    def __iter__(self) -> Iterator[Member]: ...

    def __len__(self) -> int: ...

    def __contains__(self, instance_id: str) -> bool: ...

    def __getitem__(self, instance_id: str) -> Member: ...

    async def start(self, counts: Mapping[str, int]) -> None:
        """Wait until the first instances are ready.

        :raises InstanceStartError: when an instance does not become ready.
        """
        ...

    async def scale(self, counts: Mapping[str, int]) -> None:
        """Add or drain instances until each role in ``counts`` has its number; do not wait.

        :raises ChangeSomething: when there is no memory for more, or the manager refuses.
        :raises TryLater: when the cluster's manager does not answer.
        """
        ...

    async def drain(self, instance_id: str) -> None:
        """Take an instance out of service.

        :raises ChangeSomething: when no instance has this id, or it is the last that serves.
        :raises TryLater: when the cluster's manager does not answer.
        """
        ...

    async def close(self) -> None:
        """End the instances, or disconnect from those of a manager."""
        ...


class FrontLoad(RoleWork, Protocol):
    """The load that a front puts on an instance."""

    @property
    def is_short(self) -> bool:
        """Whether the instance is short of memory, by its last heartbeat."""
        ...

    @property
    def num_leaving(self) -> int:
        """Number of the front's requests that are moving away."""
        ...

    @property
    def num_coming(self) -> int:
        """Number of the front's requests that are moving there."""
        ...

    def movable(self) -> Sequence[MovableView]:
        """Return the requests that could leave the instance, the oldest first."""
        ...


class Joins(Protocol):
    """A cluster that a front joins."""

    @property
    def name(self) -> str:
        """Name of the front, unique in the cluster."""
        ...

    def members(
        self, limits: FrontLimits, callbacks: MemberCallbacks, lines: Mapping[str, FrontLoad]
    ) -> Fleet:
        """Return the cluster's instances, for a new front.

        :param lines: of the front, read-only; the manager receives their load.
        """
        ...
