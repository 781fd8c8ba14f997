"""A manager and a front whose instances are placed without Ray."""

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest

from kvell.fleet.instance.instance_process import InstanceLine
from kvell.fleet.manager.manager import Manager
from kvell.fleet.placing.cluster_site import ClusterSite
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.supervisor import RestartPolicy
from kvell.front.front import Front
from tests.fleet.placing.host_placement import HostPlacement
from tests.fleet.placing.placed_front import placed_front
from tests.fleet.seen import members_of
from tests.front.seen import line_to

WORDS = ("--door", "{host}", "--incarnation", "{incarnation}", "--instance-id", "{instance_id}")
QUICK = FrontLimits(
    startup_seconds=20, drain_seconds=5, silence_seconds=5, restart=RestartPolicy(0.01, 0.05, 3)
)


@dataclass(frozen=True)
class Placed:
    """A front that serves, and what stands behind it."""

    front: Front
    placement: HostPlacement
    manager: Manager

    def restarted(self) -> bool:
        told = [one for one, _ in self.front.instances()]
        return any(one.restarts for one in told) and all(one.state == "serving" for one in told)

    def managers_line(self, instance_id: str) -> InstanceLine:
        return line_to(members_of(self.manager)[instance_id].supervisor)


Served = Callable[..., AbstractAsyncContextManager[Placed]]


@pytest.fixture
def served() -> Served:
    """``async with served("--credits", "3", instances={…}) as placed: …``."""

    @asynccontextmanager
    async def serving(
        *arguments: str,
        instances: dict[str, int] | None = None,
        limits: FrontLimits = QUICK,
        placing_seconds: float = 20.0,
    ) -> AsyncIterator[Placed]:
        secret = secrets.token_bytes(32)
        placement = HostPlacement(secret)
        site = ClusterSite(placement, secret, "kvell-test", placing_seconds)
        command = [*WORDS, *arguments]
        counts = instances or {"mixed": 1}
        async with placed_front(command, counts, limits, site, secret) as (front, manager):
            yield Placed(front, placement, manager)
        assert placement.is_closed

    return serving
