"""A front whose instances come over TCP, without Ray."""

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest

from kvell.server.front.front import Front
from kvell.server.front.front_limits import FrontLimits
from kvell.server.instance.restart import RestartPolicy
from kvell.server.placing.cluster_site import ClusterSite
from kvell.server.placing.entrance import Entrance
from tests.server.placing.host_placer import HostPlacer

WORDS = ("--front", "{front}", "--incarnation", "{incarnation}", "--instance-id", "{instance_id}")
QUICK = FrontLimits(
    startup_seconds=20, drain_seconds=5, silence_seconds=5, restart=RestartPolicy(0.01, 0.05, 3)
)


@dataclass(frozen=True)
class Placed:
    """A front that serves, and what stands behind it."""

    front: Front
    placer: HostPlacer
    entrance: Entrance

    def restarted(self) -> bool:
        """Whether an instance was started again, and all serve."""
        told = [one for one, _ in self.front.instances()]
        return any(one.restarts for one in told) and all(one.state == "serving" for one in told)


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
        entrance = Entrance("127.0.0.1", secret)
        placer = HostPlacer(entrance.address, secret)
        site = ClusterSite(placer, entrance, placing_seconds)
        front = Front(
            [*WORDS, *arguments], instances=instances or {"mixed": 1}, limits=limits, site=site
        )
        async with front:
            yield Placed(front, placer, entrance)
        assert placer.is_closed

    return serving
