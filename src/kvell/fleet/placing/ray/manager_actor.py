"""The manager of a cluster as an actor of Ray."""

import asyncio
import logging
import os
import threading
from concurrent.futures import Future

import msgspec
import ray

from kvell.errors import KvellError
from kvell.fleet.manager.manager import Manager
from kvell.fleet.manager.settings import ClusterSettings
from kvell.fleet.placing.cluster_site import ClusterSite
from kvell.fleet.placing.ray.placement import RayPlacement
from kvell.wire.decoding import decode

LISTEN_SECONDS = 30.0
"""A manager that Ray has just placed listens within this time."""


class ManagerActor:
    """The manager of a cluster as an actor of Ray, which ends itself when the cluster is over."""

    def __init__(self, encoded: bytes) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        self._settings = decode(msgspec.msgpack.Decoder(ClusterSettings), encoded)
        self._address: Future[str] = Future()
        self._itself = ray.get_runtime_context().current_actor
        host = str(ray.util.get_node_ip_address())
        threading.Thread(target=self._run, args=(host,), name="kvell-manager", daemon=True).start()

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    def meet(self) -> tuple[str, bytes]:
        """Return the manager's address for fronts, and the cluster's secret."""
        return self._address.result(LISTEN_SECONDS), self._settings.secret

    def _run(self, host: str) -> None:
        try:
            asyncio.run(self._managed(host))
        except KvellError:
            logging.getLogger(__name__).exception("the cluster could not start")
        except BaseException:
            logging.getLogger(__name__).exception("the manager failed")
            os._exit(1)  # Ray starts it again
        ray.kill(self._itself, no_restart=True)

    async def _managed(self, host: str) -> None:
        given = self._settings
        placement = RayPlacement(
            given.secret,
            given.name,
            on_wait=lambda what: manager.set_waits_for(what),  # noqa: PLW0108 - made below
        )
        site = ClusterSite(placement, given.secret, given.name, given.limits.startup_seconds)
        manager = Manager(
            given.command,
            given.counts,
            given.limits,
            site,
            given.secret,
            pool=given.pool,
            host=host,
            fingerprint=given.fingerprint,
            adaptive_roles=given.pool.adaptive_roles,
        )
        async with manager:
            self._address.set_result(manager.address)
            await manager.run()
