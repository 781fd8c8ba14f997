"""A manager and a front in one process, over a site that a test chooses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from kvell.fleet.followed.followed_members import FollowedCluster, ManagerAddress
from kvell.fleet.instance.instance_process import InstanceStartError
from kvell.fleet.manager.manager import Manager
from kvell.fleet.placing.cluster_site import ClusterSite
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.front.front import Front


@asynccontextmanager
async def placed_front(
    command: Sequence[str],
    counts: Mapping[str, int],
    limits: FrontLimits,
    site: ClusterSite,
    secret: bytes,
) -> AsyncIterator[tuple[Front, Manager]]:
    """Both end behind it, and the cluster with them."""
    manager = Manager(command, counts, limits, site, secret, pool=PoolSettings())

    async def find() -> ManagerAddress:
        return ManagerAddress(manager.address, secret, "")

    async with manager:
        over = asyncio.create_task(manager.run())
        try:
            async with Front(limits=limits, joins=FollowedCluster(find)) as front:
                yield front, manager
        finally:
            with contextlib.suppress(InstanceStartError):  # the front has been told
                await over
