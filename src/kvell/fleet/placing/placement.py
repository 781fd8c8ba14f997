"""What places instances on machines; Ray does, and tests do it without."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvell.errors import KvellError


class PlacingError(KvellError):
    """A machine was not found or does not answer: nothing is known of an instance there."""


class NoRoomError(PlacingError):
    """No machine has room for an instance, and none will have unless the user changes something;
    the message says what, as that of :class:`.ChangeSomething`."""


@dataclass(frozen=True)
class Placed:
    """Where an incarnation was started.

    :param host: address of its machine.
    :param pid: its process id there.
    :param address: where it listens for fronts and the manager, like ``tcp://10.0.0.1:5000``; ""
        if it ended before it did.
    """

    host: str
    pid: int
    address: str


@dataclass(frozen=True)
class Found:
    """An instance that was placed before, by a manager that is no more.

    :param incarnation: that runs; 0 if none does.
    :param placed: where it runs; None if none does.
    """

    instance_id: str
    incarnation: int = 0
    placed: Placed | None = None


@dataclass(frozen=True)
class Ended:
    """How an incarnation ended.

    :param exit_code: below 0 it is the signal that ended it.
    :param last_words: the last lines that it wrote to stderr.
    """

    exit_code: int
    last_words: str = ""


class Placement(Protocol):
    """Starts instances on machines that it chooses, and watches them there."""

    async def found(self) -> list[Found]:
        """The instances that are placed already; they need not enter again.

        :raises PlacingError: when that is not known.
        """
        ...

    def enter(self, instance_id: str) -> None:
        """An instance will be started, and maybe again and again."""
        ...

    def leave(self, instance_id: str) -> None:
        """An instance is gone for good; what it had is free for others."""
        ...

    async def start(
        self, instance_id: str, words: Sequence[str], incarnation: int, within_seconds: float
    ) -> Placed:
        """Start an incarnation; an earlier one of the same instance is ended first.

        It returns once the instance listens, or has ended; its weights may not be there yet.

        :param words: arguments of ``kvell``.  The machine fills in ``{host}`` and ``{threads}``.
        :raises PlacingError: when no machine takes it in time.
        """
        ...

    async def ended(self, instance_id: str, incarnation: int) -> Ended | None:
        """How an incarnation ended; None while it runs.

        :raises PlacingError: when its machine does not say.
        """
        ...

    async def stop(self, instance_id: str, incarnation: int) -> None:
        """End an incarnation at once, if it still runs.

        :raises PlacingError: when its machine does not answer.
        """
        ...

    async def close(self) -> None:
        """End all instances, and give back what was reserved."""
        ...
