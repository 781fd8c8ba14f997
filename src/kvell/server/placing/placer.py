"""What places instances on machines; Ray does, and tests do it without."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvell.errors import KvellError


class PlacingError(KvellError):
    """A machine was not found or does not answer: nothing is known of an instance there."""


@dataclass(frozen=True)
class Placed:
    """Where an incarnation was started.

    :param host: address of its machine.
    :param pid: its process id there.
    """

    host: str
    pid: int


@dataclass(frozen=True)
class Ended:
    """How an incarnation ended.

    :param exit_code: below 0 it is the signal that ended it.
    :param last_words: the last lines that it wrote to stderr.
    """

    exit_code: int
    last_words: str = ""


class Placer(Protocol):
    """Starts instances on machines that it chooses, and watches them there."""

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

        :param words: arguments of ``kvell``.  The machine fills in ``{front}``, ``{host}`` and
            ``{threads}``.
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
