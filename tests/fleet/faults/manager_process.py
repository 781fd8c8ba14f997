"""A cluster's manager as a process of its own, whose instances are placed by machines.

Arguments: the path of the machines' socket, a port, the instances, seconds of a lease and of a
lonely cluster, and then the instances' own.  The first bytes of stdin are the secret; when stdin
ends, so does this process, and nothing else.  Prints where it listens.
"""

import asyncio
import json
import logging
import os
import sys
import threading

import kvell.fleet.manager.manager as manager_module
from kvell.fleet.instance.restart import RestartPolicy
from kvell.fleet.manager.manager import Manager, Superseded
from kvell.fleet.placing.cluster_site import ClusterSite
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.serving.door import read_secret
from tests.fleet.faults.machines.placement import NodePlacement

WORDS = ("--door", "{host}", "--incarnation", "{incarnation}", "--instance-id", "{instance_id}")
SILENCE_SECONDS = 1.5
LIMITS = FrontLimits(
    startup_seconds=20,
    drain_seconds=10,
    silence_seconds=SILENCE_SECONDS,
    restart=RestartPolicy(0.01, 0.05, 10),
)
POOL = "kvell-faults"
STOOD_DOWN = 3
"""Exit status of a manager that has met a newer one."""


async def serve(
    secret: bytes,
    machines: str,
    port: int,
    counts: dict[str, int],
    lonely_seconds: float,
    arguments: list[str],
) -> None:
    site = ClusterSite(NodePlacement(machines), secret, POOL, placing_seconds=20)
    manager = Manager(
        *([*WORDS, *arguments], counts, LIMITS, site, secret),
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
    machines, port, counts, times, *arguments = sys.argv[1:]
    lease_seconds, lonely_seconds = json.loads(times)
    manager_module.FRONT_LEASE_SECONDS = lease_seconds  # type: ignore[attr-defined]
    stdin = sys.stdin.fileno()
    secret = read_secret(stdin)
    threading.Thread(target=_end_with, args=(stdin,), daemon=True).start()
    try:
        asyncio.run(
            serve(secret, machines, int(port), json.loads(counts), lonely_seconds, arguments)
        )
    except Superseded:
        return STOOD_DOWN
    return 0


def _end_with(descriptor: int) -> None:
    """A manager that its test has forgotten ends as if it were killed."""
    while os.read(descriptor, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
