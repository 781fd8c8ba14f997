"""A cluster's manager as a process of its own, whose instances are placed by machines.

Arguments: the path of the machines' socket, a port, the instances, seconds (of a lease, of a lonely
cluster, of a start, of silence), and then the instances' own.  The first bytes of stdin are the
secret; when stdin ends, so does this process, and nothing else.  Prints where it listens.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import threading

import kvell.fleet.manager.manager as manager_module
from kvell.fleet.manager.manager import Manager, Superseded
from kvell.fleet.placing.cluster_site import ClusterSite
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.fleet.started.supervisor import RestartPolicy
from kvell.serving.fronts import read_secret
from tests.fleet.faults.machines.placement import NodePlacement

RESTART = RestartPolicy(0.01, 0.05, 10)
POOL = "kvell-faults"
STOOD_DOWN = 3
"""Exit status of a manager that has met a newer one."""


async def serve(
    secret: bytes,
    machines: str,
    port: int,
    counts: dict[str, int],
    times: tuple[float, float, float],
    words: list[str],
) -> None:
    lonely_seconds, startup_seconds, silence_seconds = times
    site = ClusterSite(NodePlacement(machines), secret, POOL, placing_seconds=startup_seconds)
    limits = FrontLimits(
        startup_seconds=startup_seconds,
        drain_seconds=10,
        silence_seconds=silence_seconds,
        restart=RESTART,
    )
    manager = Manager(
        *(words, counts, limits, site, secret),
        pool=PoolSettings(),
        port=port,
        lonely_seconds=lonely_seconds,
    )
    async with manager:
        sys.stdout.write(f"{manager.address}\n")
        sys.stdout.flush()
        await manager.run()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="manager: %(message)s")
    machines, port, counts, seconds, *words = sys.argv[1:]
    lease_seconds, *times = json.loads(seconds)
    manager_module.FRONT_LEASE_SECONDS = lease_seconds  # type: ignore[attr-defined]
    stdin = sys.stdin.fileno()
    secret = read_secret(stdin)
    threading.Thread(target=_end_with, args=(stdin,), daemon=True).start()
    try:
        asyncio.run(serve(secret, machines, int(port), json.loads(counts), times, words))
    except Superseded:
        return STOOD_DOWN
    return 0


def _end_with(descriptor: int) -> None:
    """A manager that its test has forgotten ends as if it were killed."""
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
