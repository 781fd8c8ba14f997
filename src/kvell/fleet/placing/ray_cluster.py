"""Ray places a cluster's manager and its instances on machines; the only file that imports it.

::

    fronts ── meet ──► ManagerActor          a named detached actor, started again by Ray
                          │ ── a placement group ──► Ray   bundles spread over machines
                          │ ── start, stop ──► KeeperActor ──► Launcher ──► kvell instance
                          └──── the instance protocol, over TCP ───────────────┘ ◄── fronts

Ray sees orders and ends, never a prompt, a token or a page.  When a machine dies, Ray starts its
actors elsewhere.  Keepers start nothing by themselves: the manager orders the next incarnation,
with its own bounds.  A manager that Ray has started again finds the keepers by their names.
"""

import asyncio
import contextlib
import functools
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvell.errors import ChangeSomething, KvellError, TryLater
from kvell.fleet.manager.manager import Manager
from kvell.fleet.manager.messages import MANAGER
from kvell.fleet.manager.settings import ClusterSettings
from kvell.fleet.placing.cluster_site import ClusterSite
from kvell.fleet.placing.launcher import Launcher
from kvell.fleet.placing.placement import Ended, Found, Placed, PlacingError

NAMESPACE = "kvell"
MEET_SECONDS = 30.0
"""A manager that Ray has just placed says where it listens within this time."""
BUNDLE = {"CPU": 1.0}
"""What an instance reserves: one of a machine's CPUs.  More would leave no machine with room for
the instances of one that died."""
LOOK_SECONDS = 1.0
"""A call of Ray in a thread returns after so long, so that nobody waits for it at the end."""
ANSWER_SECONDS = 5.0
"""A machine that says nothing for so long does not answer."""
NAME_BYTES = 6
REASON_CHARS = 120
ATTEMPTS = 3
"""Of connecting to a Ray that answers but does not serve yet."""


class ManagerActor:
    """The manager of a cluster as an actor of Ray; it ends itself when the cluster is over.

    :param encoded: its :class:`.ClusterSettings`.
    """

    def __init__(self, encoded: bytes) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        self._settings = ClusterSettings.decoded(encoded)
        self._address: Future[str] = Future()
        self._itself = ray.get_runtime_context().current_actor
        host = str(ray.util.get_node_ip_address())
        threading.Thread(target=self._run, args=(host,), name="kvell-manager", daemon=True).start()

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    def meet(self) -> tuple[str, bytes]:
        """Where it listens for fronts, and the cluster's secret."""
        return self._address.result(MEET_SECONDS), self._settings.secret

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
        told = self._settings
        placer = RayPlacement(told.secret, told.name)
        site = ClusterSite(placer, told.secret, told.name, told.limits.startup_seconds)
        manager = Manager(
            *(told.command, told.counts, told.limits, site, told.secret),
            pool=told.pool,
            host=host,
            fingerprint=told.fingerprint,
            adaptive_roles=told.pool.adaptive_roles,
        )
        async with manager:
            self._address.set_result(manager.address)
            await manager.run()


class KeeperActor:
    """A :class:`.Launcher` as an actor of Ray; one for each instance.

    :param secret: of the cluster.
    :param sharing: instances that this machine may have.
    """

    def __init__(self, secret: bytes, sharing: int) -> None:
        threads = max(1, int(_processors_here()) // sharing)
        self._keeper = Launcher(secret, str(ray.util.get_node_ip_address()), threads)

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    def start(self, words: Sequence[str], incarnation: int) -> tuple[str, int, str]:
        """Start an incarnation; what is known of it is as of :class:`.Placed`.

        Ray asks again where it starts the actor anew, so it may be asked twice.
        """
        return astuple(self._keeper.start(words, incarnation))

    def runs(self) -> tuple[int, tuple[str, int, str]] | None:
        """The incarnation that runs, and where; None if none does."""
        found = self._keeper.runs()
        return None if found is None else (found[0], astuple(found[1]))

    def ended(self, incarnation: int) -> tuple[int, str] | None:
        """Exit status and last words of an incarnation; None while it runs."""
        ended = self._keeper.ended(incarnation)
        return None if ended is None else (ended.exit_code, ended.last_words)

    def stop(self, incarnation: int) -> None:
        """End an incarnation at once."""
        self._keeper.stop(incarnation)


@dataclass(frozen=True)
class Machine:
    """A node of Ray.

    :param processors: that it has for actors.
    """

    node_id: str
    address: str
    is_alive: bool
    processors: float


@dataclass
class _Bundle:
    """A reserved place in a group, and the group's name."""

    group: PlacementGroup
    name: str
    index: int


@dataclass(frozen=True)
class _Place:
    """What the name of a keeper says: whose it is, and its bundle."""

    instance_id: str
    group: str
    index: int

    def __str__(self) -> str:
        return f"{self.instance_id}@{self.group}@{self.index}"

    @staticmethod
    def of(name: str) -> "_Place | None":
        """None for the name of a manager."""
        words = name.partition("/")[2].split("@")
        return _Place(words[0], words[1], int(words[2])) if len(words) == 3 else None


class RayPlacement:
    """A :class:`.Placement`, used from one loop of a process that is connected.

    :param secret: of the cluster; actors get it when they are made.
    :param name: of the cluster.
    """

    def __init__(self, secret: bytes, name: str) -> None:
        self._secret, self._name = secret, name
        self._waiting: list[str] = []
        self._bundles: dict[str, _Bundle] = {}
        self._free: list[_Bundle] = []
        self._groups: list[PlacementGroup] = []
        self._actors: dict[str, Any] = {}
        self._reserving = asyncio.Lock()

    async def found(self) -> list[Found]:
        """See :class:`.Placement`; a keeper whose machine does not answer has nothing that runs."""
        for name in await _called(lambda: _named(f"{self._name}/")):
            place = _Place.of(name)
            if place is not None and place.instance_id not in self._actors:
                await _called(functools.partial(self._take_over, name, place))
        return [await self._found(instance_id) for instance_id in self._actors]

    def enter(self, instance_id: str) -> None:
        """See :class:`.Placement`; instances that enter before the first start are reserved
        together."""
        self._waiting.append(instance_id)

    def leave(self, instance_id: str) -> None:
        """See :class:`.Placement`."""
        if instance_id in self._waiting:
            self._waiting.remove(instance_id)
        actor = self._actors.pop(instance_id, None)
        bundle = self._bundles.pop(instance_id, None)
        with contextlib.suppress(RayError, OSError, RuntimeError):  # Ray itself has gone
            if actor is not None:
                ray.kill(actor, no_restart=True)
            if bundle is not None:
                self._free.append(bundle)
                self._give_back(bundle.group)

    async def start(
        self, instance_id: str, words: Sequence[str], incarnation: int, within_seconds: float
    ) -> Placed:
        """See :class:`.Placement`."""
        async with self._reserving:
            if instance_id not in self._bundles:
                await self._reserve(within_seconds)
        if instance_id not in self._actors:
            self._actors[instance_id] = await _called(functools.partial(self._make, instance_id))
        ordered = self._actors[instance_id].start.remote(list(words), incarnation)
        return Placed(*await _answer(ordered, within_seconds, "no machine took the instance"))

    async def ended(self, instance_id: str, incarnation: int) -> Ended | None:
        """See :class:`.Placement`."""
        told = await self._asked(instance_id, "ended", incarnation)
        return None if told is None else Ended(*told)

    async def stop(self, instance_id: str, incarnation: int) -> None:
        """See :class:`.Placement`."""
        await self._asked(instance_id, "stop", incarnation)

    async def close(self) -> None:
        """See :class:`.Placement`."""
        await _called(self._close)

    def _take_over(self, name: str, place: "_Place") -> None:
        """Know a keeper that a manager before has made, and its bundle."""
        known = (one.group for one in self._bundles.values() if one.name == place.group)
        group = next(known, None)
        if group is None:
            group = get_placement_group(place.group)
            self._groups.append(group)
        self._actors[place.instance_id] = ray.get_actor(name, NAMESPACE)
        self._bundles[place.instance_id] = _Bundle(group, place.group, place.index)

    async def _found(self, instance_id: str) -> Found:
        try:
            runs = await self._asked(instance_id, "runs")
        except PlacingError:
            runs = None
        return Found(instance_id) if runs is None else Found(instance_id, runs[0], Placed(*runs[1]))

    async def _asked(self, instance_id: str, what: str, *words: int) -> Any:
        actor = self._actors.get(instance_id)
        if actor is None:
            raise PlacingError(f"{instance_id} is nowhere")
        answer = getattr(actor, what).remote(*words)
        return await _answer(answer, ANSWER_SECONDS, "its machine does not answer")

    async def _reserve(self, within_seconds: float) -> None:
        """Reserve for all that wait, in one group."""
        names, self._waiting = self._waiting, []
        while names and self._free:
            self._bundles[names.pop(0)] = self._free.pop()
        if not names:
            return
        bundles = [dict(BUNDLE) for _ in names]
        name = f"{self._name}-{secrets.token_hex(NAME_BYTES)}"
        make = functools.partial(placement_group, bundles, "SPREAD", name, "detached")
        group = await _called(make)
        self._groups.append(group)
        problem = f"the cluster has no room for {len(names)} more, with a CPU for each"
        try:
            await _answer(group.ready(), within_seconds, problem)
        except BaseException:
            self._groups.remove(group)
            self._waiting += names
            await _called(lambda: remove_placement_group(group))
            raise
        self._bundles |= {one: _Bundle(group, name, index) for index, one in enumerate(names)}

    def _give_back(self, group: PlacementGroup) -> None:
        """Let Ray have the room of a group that nobody is in any more; it cannot have a part."""
        if any(one.group is group for one in self._bundles.values()):
            return
        self._free = [one for one in self._free if one.group is not group]
        self._groups.remove(group)
        remove_placement_group(group)

    def _make(self, instance_id: str) -> Any:
        bundle = self._bundles[instance_id]
        with_room = sum(1 for one in machines() if one.is_alive and one.processors)
        sharing = math.ceil(len(self._bundles) / max(1, with_room))
        kind = ray.remote(KeeperActor).options(
            name=f"{self._name}/{_Place(instance_id, bundle.name, bundle.index)}",
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=BUNDLE["CPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(bundle.group, bundle.index),
        )
        return kind.remote(self._secret, sharing)

    def _close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        for group in self._groups:
            remove_placement_group(group)


async def met(address: str, settings: ClusterSettings) -> tuple[str, bytes]:
    """Find the manager of a cluster, and let Ray place one if there is none; see
    :meth:`ManagerActor.meet`.

    :param address: Ray's.
    :param settings: of a cluster that is new.
    :raises ChangeSomething: when no Ray answers at the address.
    :raises TryLater: when the manager does not answer.
    """
    await asyncio.to_thread(connect, address)
    try:
        actor = await _called(functools.partial(_manager, settings))
        told: tuple[str, bytes] = await _answer(
            actor.meet.remote(), MEET_SECONDS, "the cluster's manager does not answer"
        )
    except PlacingError as error:
        raise TryLater(str(error)) from error
    finally:
        await asyncio.to_thread(disconnect)
    return told


def _manager(settings: ClusterSettings) -> Any:
    kind = ray.remote(ManagerActor).options(
        name=f"{settings.name}/{MANAGER}",
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        get_if_exists=True,
    )
    return kind.remote(settings.encoded())


def _named(beginning: str) -> list[str]:
    """Names of the actors of Kvell that begin so."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [str(one["name"]) for one in actors if one["namespace"] == NAMESPACE]
    return [name for name in names if name.startswith(beginning)]


def connect(address: str) -> None:
    """Connect this process to Ray, quietly.

    :raises ChangeSomething: when no Ray answers at the address.
    """
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    for attempt in range(ATTEMPTS):
        try:
            _probe(address)
            ray.init(
                address=address,
                namespace=NAMESPACE,
                logging_level=logging.CRITICAL,
                log_to_driver=False,
                configure_logging=False,
            )
            break
        except (RayError, OSError, RuntimeError, ValueError) as error:
            # A cluster that has just begun says no at first where clients come in.
            if attempt + 1 < ATTEMPTS and isinstance(error, ConnectionAbortedError):
                continue
            problem = f"no Ray answers there ({_reason(error)})"
            remedy = "start one with: kvell cluster up, or use local-ray"
            raise ChangeSomething("--cluster", address, problem, remedy) from error
    with contextlib.suppress(AttributeError):  # this process is no client, but a part of Ray
        ray.util.client.ray.get_context().client_worker.log_client.disable_logs()


def disconnect() -> None:
    """End the connection; what belongs to it ends too."""
    ray.shutdown()


def machines() -> list[Machine]:
    """All machines that Ray knows, those that died too."""
    return [
        Machine(
            str(one["NodeID"]),
            str(one["NodeManagerAddress"]),
            bool(one["Alive"]),
            float(one["Resources"].get("CPU", 0.0)),
        )
        for one in ray.nodes()
    ]


def _processors_here() -> float:
    here = ray.get_runtime_context().get_node_id()
    return next((one.processors for one in machines() if one.node_id == here), 1.0)


async def _called(call: Callable[[], Any]) -> Any:
    """Run a short call of Ray in a thread.

    :raises PlacingError: when it fails.
    """
    try:
        return await asyncio.to_thread(call)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise PlacingError(f"Ray: {_reason(error)}") from error


async def _answer(asked: Any, within_seconds: float, problem: str) -> Any:
    """What Ray answers.

    :raises PlacingError: when it fails, or is not there in time.
    """
    deadline = time.monotonic() + within_seconds
    while True:
        try:
            return await asyncio.to_thread(ray.get, asked, timeout=LOOK_SECONDS)
        except GetTimeoutError as error:
            if time.monotonic() >= deadline:
                raise PlacingError(f"{problem} ({within_seconds:g} s)") from error
        except (RayError, OSError, RuntimeError) as error:
            raise PlacingError(f"{problem} ({_reason(error)})") from error


def _probe(address: str) -> None:
    """See whether anybody listens: Ray itself would try for more than a minute.

    :raises OSError: when nobody does.
    """
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    if parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), ANSWER_SECONDS).close()


def _reason(error: Exception) -> str:
    """The beginning of the last line: what stands before it is where."""
    return next(iter(str(error).strip().splitlines()[::-1]), type(error).__name__)[:REASON_CHARS]
