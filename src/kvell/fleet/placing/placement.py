"""The protocol of a placement, which starts instances on machines: Ray, or a stand-in of tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvell.errors import KvellError


class PlacingError(KvellError):
    """No machine was found, or the machine of an instance does not answer."""


class NoRoomError(PlacingError):
    """No machine has room for an instance unless the user changes something; the message is that
    of a :class:`.ChangeSomething`."""


@dataclass(frozen=True)
class InstancePlace:
    """Machine, process and address of an incarnation.

    :param pid: process id there; 0 if the incarnation was stopped before its start.
    :param address: where the incarnation listens for fronts and the manager, like
        ``tcp://10.0.0.1:5000``; "" if it ended before it listened.
    """

    host: str
    pid: int
    address: str


@dataclass(frozen=True)
class PlacedInstance:
    """An instance that an earlier manager has placed.

    :param incarnation: the incarnation that runs; 0 if none does.
    :param placed: machine and address of that incarnation; None if none runs.
    """

    instance_id: str
    incarnation: int = 0
    placed: InstancePlace | None = None


@dataclass(frozen=True)
class IncarnationEnd:
    """The end of an incarnation.

    :param exit_code: exit status; below 0 the signal that ended the process.
    """

    exit_code: int
    last_words: str = ""


class Placement(Protocol):
    """A protocol: start instances on machines that the placement chooses, and watch them there."""

    async def find(self) -> list[PlacedInstance]:
        """Return the instances that are placed already; they need not enter again.

        :raises PlacingError: when that is not known.
        """
        ...

    def enter(self, instance_id: str) -> None: ...

    def leave(self, instance_id: str) -> None: ...

    async def start(
        self, instance_id: str, words: Sequence[str], incarnation: int, within_seconds: float
    ) -> InstancePlace:
        """Start an incarnation; an earlier one of the same instance is ended first.

        The call returns once the instance listens, or has ended; its weights may not be loaded yet.

        :param words: arguments of ``kvell``.  The machine fills in ``{host}`` and ``{threads}``.
        :raises NoRoomError: when no machine has room, and none will have.
        :raises PlacingError: when no machine takes the instance in time.
        """
        ...

    async def end_of(self, instance_id: str, incarnation: int) -> IncarnationEnd | None:
        """Return the end of an incarnation; None while it runs.

        :raises PlacingError: when its machine does not answer.
        """
        ...

    async def stop(self, instance_id: str, incarnation: int) -> None:
        """Kill an incarnation, if it still runs or is being started.

        :raises PlacingError: when its machine does not answer.
        """
        ...

    async def close(self) -> None:
        """End all instances, and give back what was reserved."""
        ...
