"""The site of instances: this machine, or the machines of a cluster."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvell.fleet.instance.instance_process import InstanceProcess, LaunchPlan


class Site(Protocol):
    """A place that starts instances; the front does not know where they run."""

    def enter(self, instance_id: str) -> None:
        """Announce an instance that will be started, perhaps many times."""
        ...

    def leave(self, instance_id: str) -> None:
        """Give back the room of an instance that is gone for good."""
        ...

    async def find(self) -> dict[str, int]:
        """Return the instances that an earlier manager has started here.

        :returns: the incarnation of each instance that runs; 0 for one that does not run.
        """
        ...

    async def rejoin(self, instance_id: str) -> InstanceProcess | None:
        """Connect to the incarnation that :meth:`find` has returned.

        :returns: None if there was none, it does not answer, or it was connected to before.
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
        :raises ChangeSomething: if there is certainly none.
        """
        ...

    async def close(self) -> None:
        """Free what the instances shared, once they have ended."""
        ...
