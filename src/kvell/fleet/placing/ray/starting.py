"""From a front's settings to its cluster's manager, which Ray starts if there is none."""

import asyncio
import functools
from typing import Any

import msgspec
import ray

from kvell.errors import TryLater
from kvell.fleet.manager.messages import MANAGER
from kvell.fleet.manager.settings import ClusterSettings
from kvell.fleet.placing.placement import PlacingError
from kvell.fleet.placing.ray.connection import await_answer, call, connect, disconnect
from kvell.fleet.placing.ray.manager_actor import LISTEN_SECONDS, ManagerActor
from kvell.fleet.placing.ray.names import NAMESPACE


async def find_manager(address: str, settings: ClusterSettings) -> tuple[str, bytes]:
    """Find the manager of a cluster, and let Ray place one if there is none.

    :returns: as :meth:`.ManagerActor.meet`.
    :raises ChangeSomething: when no Ray answers at the address.
    :raises TryLater: when the manager does not answer.
    """
    await asyncio.to_thread(connect, address)
    try:
        actor = await call(functools.partial(_manager, settings))
        problem = "the cluster's manager does not answer"
        met: tuple[str, bytes] = await await_answer(actor.meet.remote(), LISTEN_SECONDS, problem)
    except PlacingError as error:
        raise TryLater(str(error)) from error
    finally:
        await asyncio.to_thread(disconnect)
    return met


def _manager(settings: ClusterSettings) -> Any:
    kind = ray.remote(ManagerActor).options(
        name=f"{settings.name}/{MANAGER}",
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        get_if_exists=True,
    )
    return kind.remote(msgspec.msgpack.encode(settings))
