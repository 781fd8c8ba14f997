"""Ray places instances on machines; the only file that imports it.

::

    front ── one placement group ──► Ray          a bundle for each instance, spread over machines
      │ ──── a named detached actor ──► KeeperActor ──► Keeper ──► kvell instance
      └ ◄─── the instance protocol, over TCP ──────────────────────────┘

Ray sees orders and ends, never a prompt, a token or a page.  When a machine dies, Ray starts its
actors elsewhere.  They start nothing by themselves: the front orders the next incarnation, with
its own bounds.  The group belongs to the front, so that Ray ends all actors when the front dies.
"""

import asyncio
import contextlib
import functools
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvell.errors import ChangeSomething
from kvell.server.placing.keeper import Keeper
from kvell.server.placing.placer import Ended, Placed, PlacingError

NAMESPACE = "kvell"
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


class KeeperActor:
    """A :class:`.Keeper` as an actor of Ray; one for each instance.

    :param front: where the front listens.
    :param secret: of the cluster.
    :param sharing: instances that this machine may have.
    """

    def __init__(self, front: str, secret: bytes, sharing: int) -> None:
        self._host = str(ray.util.get_node_ip_address())
        threads = max(1, int(_processors_here()) // sharing)
        self._keeper = Keeper(front, secret, self._host, threads)

    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    def start(self, words: Sequence[str], incarnation: int) -> tuple[str, int]:
        """Start an incarnation; the machine's address and the process's id.

        Ray asks again where it starts the actor anew, so it may be asked twice.
        """
        return self._host, self._keeper.start(words, incarnation)

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
    """A reserved place in a group."""

    group: PlacementGroup
    index: int


class RayPlacer:
    """A :class:`.Placer`; made by :meth:`connect`, and used from one loop.

    :param front: where the front listens.
    :param secret: of the cluster; actors get both when they are made.
    """

    def __init__(self, front: str, secret: bytes) -> None:
        self._front, self._secret = front, secret
        self._name = f"kvell-{secrets.token_hex(NAME_BYTES)}"
        self._waiting: list[str] = []
        self._bundles: dict[str, _Bundle] = {}
        self._free: list[_Bundle] = []
        self._groups: list[PlacementGroup] = []
        self._actors: dict[str, Any] = {}
        self._reserving = asyncio.Lock()

    def enter(self, instance_id: str) -> None:
        """See :class:`.Placer`; those that enter before the first start are reserved together."""
        self._waiting.append(instance_id)

    def leave(self, instance_id: str) -> None:
        """See :class:`.Placer`."""
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
        """See :class:`.Placer`."""
        async with self._reserving:
            if instance_id not in self._bundles:
                await self._reserve(within_seconds)
        if instance_id not in self._actors:
            self._actors[instance_id] = await _called(functools.partial(self._make, instance_id))
        ordered = self._actors[instance_id].start.remote(list(words), incarnation)
        host, pid = await _answer(ordered, within_seconds, "no machine took the instance")
        return Placed(host, pid)

    async def ended(self, instance_id: str, incarnation: int) -> Ended | None:
        """See :class:`.Placer`."""
        told = await self._asked(instance_id, "ended", incarnation)
        return None if told is None else Ended(*told)

    async def stop(self, instance_id: str, incarnation: int) -> None:
        """See :class:`.Placer`."""
        await self._asked(instance_id, "stop", incarnation)

    async def close(self) -> None:
        """See :class:`.Placer`."""
        await _called(self._close)

    async def _asked(self, instance_id: str, what: str, incarnation: int) -> Any:
        actor = self._actors.get(instance_id)
        if actor is None:
            raise PlacingError(f"{instance_id} is nowhere")
        answer = getattr(actor, what).remote(incarnation)
        return await _answer(answer, ANSWER_SECONDS, "its machine does not answer")

    async def _reserve(self, within_seconds: float) -> None:
        """Reserve for all that wait, in one group."""
        names, self._waiting = self._waiting, []
        while names and self._free:
            self._bundles[names.pop(0)] = self._free.pop()
        if not names:
            return
        bundles = [dict(BUNDLE) for _ in names]
        name = f"{self._name}-{len(self._groups)}"
        group = await _called(lambda: placement_group(bundles, strategy="SPREAD", name=name))
        self._groups.append(group)
        problem = f"the cluster has no room for {len(names)} more, with a CPU for each"
        try:
            await _answer(group.ready(), within_seconds, problem)
        except BaseException:
            self._groups.remove(group)
            self._waiting += names
            await _called(lambda: remove_placement_group(group))
            raise
        self._bundles |= {one: _Bundle(group, index) for index, one in enumerate(names)}

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
            name=f"{self._name}/{instance_id}",
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=BUNDLE["CPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(bundle.group, bundle.index),
        )
        return kind.remote(self._front, self._secret, sharing)

    def _close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        for group in self._groups:
            remove_placement_group(group)


def connect(address: str) -> str:
    """Connect this process to Ray, quietly; the address of this machine among Ray's.

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
    return str(ray.util.get_node_ip_address())


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
