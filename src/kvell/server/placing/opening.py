"""From ``--cluster`` to a site for instances: Ray if it is installed, and addresses that fit."""

import asyncio
import importlib.util
import ipaddress
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvell.errors import ChangeSomething
from kvell.mempool.place import SECRET_BYTES
from kvell.server.placing.cluster_site import ClusterSite
from kvell.server.placing.entrance import Entrance

REMEDY = 'pip install "kvell[ray]"'


def check_ray(cluster: str) -> None:
    """Check that Ray is installed, without importing it.

    :raises ChangeSomething: if it is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise ChangeSomething("--cluster", cluster, "needs Ray, which is not installed", REMEDY)


@asynccontextmanager
async def cluster_site(
    cluster: str, host: str, placing_seconds: float
) -> AsyncIterator[ClusterSite]:
    """A site on the machines of a Ray cluster, connected until the end of ``async with``.

    :param cluster: Ray's address: ``host:port``, ``ray://host:port`` or ``auto``.
    :param host: address of this machine, at which instances reach the front.
    :param placing_seconds: most time from an order to the instance's connection.
    :raises ChangeSomething: when Ray is not installed or does not answer, or the address cannot be
        bound or reached.
    """
    check_ray(cluster)
    from kvell.server.placing import ray_cluster

    secret = secrets.token_bytes(SECRET_BYTES)
    entrance = Entrance(host, secret)
    here = await asyncio.to_thread(ray_cluster.connect, cluster)
    try:
        known = await asyncio.to_thread(ray_cluster.machines)
        check_reachable(host, here, [one.address for one in known if one.is_alive])
        placer = ray_cluster.RayPlacer(entrance.address, secret)
        yield ClusterSite(placer, entrance, placing_seconds)
    finally:
        await entrance.close()
        await asyncio.to_thread(ray_cluster.disconnect)


def check_reachable(host: str, here: str, machines: Sequence[str]) -> None:
    """Check that other machines may reach an address of this one.

    :param host: the address, or a name.
    :param here: this machine's address among Ray's.
    :param machines: addresses of all machines.
    :raises ChangeSomething: if it is a loopback address, and there are other machines.
    """
    if not _is_loopback(host):
        return
    far = [one for one in machines if one != here and not _is_loopback(one)]
    if far:
        problem = f"cannot be reached from {far[0]}"
        remedy = f"give this machine's address, like --cluster-host {here}"
        raise ChangeSomething("--cluster-host", host, problem, remedy)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
