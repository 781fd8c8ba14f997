"""Where instances run: on this machine, or on those of a cluster."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvell.fleet.instance.instance_process import InstanceProcess, LaunchPlan


class Site(Protocol):
    """Starts instances; the front does not know where they run."""

    def enter(self, instance_id: str) -> None:
        """An instance will be started, and maybe again and again."""
        ...

    def leave(self, instance_id: str) -> None:
        """An instance is gone for good."""
        ...

    async def found(self) -> dict[str, int]:
        """Instances that were started here before, by somebody who is no more.

        :returns: the incarnation of each that runs, 0 where none does.
        """
        ...

    async def rejoin(self, instance_id: str) -> InstanceProcess | None:
        """Connect to the incarnation that was found.

        :returns: None if none was, or it does not answer, or it was connected to before.
        """
        ...

    async def launch(
        self, instance_id: str, command: Sequence[str], plan: LaunchPlan
    ) -> InstanceProcess:
        """Start an incarnation and connect to it; the caller waits until it is ready.

        :param command: its command line, in which the plan's names and the site's are filled in.
        :raises InstanceStartError: when it cannot be started, or ends before it connects.
        """
        ...

    def check_room(self, contracts: Iterable[tuple[int | None, int]], further: int) -> None:
        """Check that there is room for further instances like those that serve.

        :param contracts: the process id and ``contract_bytes`` of each that serves.
        :raises ChangeSomething: if it is known that there is none.
        """
        ...

    async def close(self) -> None:
        """Give back what the instances shared, once they have ended."""
        ...
