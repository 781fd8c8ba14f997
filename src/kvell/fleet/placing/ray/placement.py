"""Ray as a :class:`.Placement`: a launcher for each instance, in a bundle of its own."""

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvell.fleet.placing.placement import (
    IncarnationEnd,
    InstancePlace,
    PlacedInstance,
    PlacingError,
)
from kvell.fleet.placing.ray.connection import await_answer, call
from kvell.fleet.placing.ray.launcher_actor import LauncherHandle
from kvell.fleet.placing.ray.record import Bundle, Record, Remains
from kvell.fleet.placing.ray.reservations import Reservations

ANSWER_SECONDS = 5.0
"""A machine that does not answer within this time counts as unreachable."""
logger = logging.getLogger(__name__)


class RayPlacement:
    """A :class:`.Placement`, used from one loop of a process that is connected.

    :param secret: of the cluster; launchers get it when they are made.
    :param on_wait: is called with what a start waits for; "" when it waits no longer.
    """

    def __init__(
        self, secret: bytes, name: str, on_wait: Callable[[str], None] = lambda what: None
    ) -> None:
        self._secret = secret
        self._reservations = Reservations(name, on_wait)
        self._waiting: list[str] = []
        self._bundles: Record = {}
        self._pending: Record = {}
        self._free: list[Bundle] = []
        self._launchers: dict[str, LauncherHandle] = {}
        self._reserving, self._writing = asyncio.Lock(), asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    async def find(self) -> list[PlacedInstance]:
        remains, self._launchers = await call(self._take_over)
        self._bundles = dict(remains.kept)
        self._free = list(remains.free)
        self._pending = dict(remains.unreserved)
        self._waiting = list(remains.unreserved)
        names = [*self._bundles, *self._waiting]
        return list(await asyncio.gather(*(self._found(name) for name in names)))

    def enter(self, instance_id: str) -> None:
        """Announce an instance; all that enter before the first start are reserved together."""
        self._waiting.append(instance_id)

    def leave(self, instance_id: str) -> None:
        if instance_id in self._waiting:
            self._waiting.remove(instance_id)
            self._pending.pop(instance_id, None)
        self._launchers.pop(instance_id, None)
        bundle = self._bundles.pop(instance_id, None)
        if bundle is not None:
            leaving = asyncio.create_task(self._give_back(instance_id, bundle))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def start(
        self, instance_id: str, words: Sequence[str], incarnation: int, within_seconds: float
    ) -> InstancePlace:
        if instance_id not in self._bundles:
            async with self._reserving:
                if instance_id not in self._bundles:
                    await self._reserve(within_seconds)
        if instance_id not in self._launchers:
            bundle = self._bundles[instance_id]
            count = len(self._bundles)
            make = functools.partial(self._reservations.launch, instance_id, bundle)
            self._launchers[instance_id] = await call(lambda: make(self._secret, count))
        ordered = self._launchers[instance_id].start.remote(list(words), incarnation)
        return InstancePlace(
            *await await_answer(ordered, within_seconds, "no machine accepted the instance")
        )

    async def end_of(self, instance_id: str, incarnation: int) -> IncarnationEnd | None:
        ended = await self._asked(instance_id, "end_of", incarnation)
        return None if ended is None else IncarnationEnd(*ended)

    async def stop(self, instance_id: str, incarnation: int) -> None:
        await self._asked(instance_id, "stop", incarnation)

    async def close(self) -> None:
        if self._leaving:
            await asyncio.wait(self._leaving)
        await call(self._reservations.remove_all)

    def _take_over(self) -> tuple[Remains, dict[str, LauncherHandle]]:
        """Sort out what an earlier manager has left; return that and its launchers."""
        remains = self._reservations.read_remains()
        for stray in remains.stray_launchers:
            self._reservations.kill_launcher(stray)
        for group in remains.stray_groups:
            self._reservations.remove_group(group)
        if not remains.kept:
            self._reservations.delete_record()
        launchers = {
            name: self._reservations.find_launcher(name, bundle)
            for name, bundle in remains.kept.items()
        }
        return remains, {
            name: launcher for name, launcher in launchers.items() if launcher is not None
        }

    async def _found(self, instance_id: str) -> PlacedInstance:
        try:
            runs = await self._asked(instance_id, "runs")
        except PlacingError:
            runs = None
        return (
            PlacedInstance(instance_id)
            if runs is None
            else PlacedInstance(instance_id, runs[0], InstancePlace(*runs[1]))
        )

    async def _asked(self, instance_id: str, question: str, *words: int) -> Any:
        launcher = self._launchers.get(instance_id)
        if launcher is None:
            raise PlacingError(f"{instance_id} runs on no machine")
        answer = getattr(launcher, question).remote(*words)
        return await await_answer(answer, ANSWER_SECONDS, "its machine does not answer")

    async def _reserve(self, within_seconds: float) -> None:
        """Reserve for all instances that wait: what is free, and one group for the others.

        The record names them before Ray gets the request: a manager that is killed meanwhile
        leaves no group without a record.
        """
        names, self._waiting = self._waiting, []
        self._drop(names)
        while names and self._free:
            self._bundles[names.pop(0)] = self._free.pop()
        if not names:
            await self._write()
            return
        group = self._reservations.drawn_name()
        pending = {name: Bundle(group, index) for index, name in enumerate(names)}
        self._pending |= pending
        try:
            await self._write()
            await call(functools.partial(self._reservations.make, group, len(names)))
            await self._reservations.wait_for_room(group, names, within_seconds)
        except BaseException:
            self._waiting += names
            self._drop(names)
            await call(functools.partial(self._reservations.remove_group, group))
            await self._write()
            raise
        self._drop(names)
        self._bundles |= pending

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._pending.pop(name, None)

    async def _write(self) -> None:
        """Write down who has which bundle now; the newest record is written last."""
        async with self._writing:
            await call(lambda: self._reservations.save_record(self._bundles | self._pending))

    async def _give_back(self, instance_id: str, bundle: Bundle) -> None:
        """End the launcher of an instance that has left; its bundle is free for others.

        Ray takes a group back when all of its bundles are free; it cannot take a part.
        """
        is_last = all(other.group != bundle.group for other in self._bundles.values())
        if is_last:
            self._free = [other for other in self._free if other.group != bundle.group]
        try:
            await self._write()
            end = functools.partial(self._reservations.end_launcher, instance_id, bundle)
            await call(end)
            if is_last:
                await call(functools.partial(self._reservations.remove_group, bundle.group))
            else:
                self._free.append(bundle)
        except PlacingError as error:
            logger.warning("the resources of %s are not freed yet: %s", instance_id, error)
