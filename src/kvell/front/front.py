"""The front: gives each request its own output, whatever happens to the instances."""

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from kvell.clock import Clock, MonotonicClock
from kvell.cluster.prefix_directory import BY_LOCALITY, PrefixDirectory
from kvell.cluster.routing.policies import DEFAULT_ROUTING, router_named
from kvell.cluster.steering.placements import Reach
from kvell.cluster.steering.roles import RoleChanger
from kvell.engine.protocol.messages import Event, Finished, Ready, Submit
from kvell.engine.protocol.notices import IndexNotice, WatchIndex
from kvell.engine.protocol.pages import LargePage, Pages
from kvell.engine.protocol.sampling_params import MAX_SEED, SamplingParams
from kvell.engine.protocol.statistics import Stats
from kvell.errors import InstanceDied
from kvell.fleet.fleet import Fleet, Joins
from kvell.fleet.instance.death import InstanceDeath
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.host import Host
from kvell.fleet.started.member import MemberCallbacks, MemberStatus, stats_of
from kvell.fleet.started.members import CLOSING, Members
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.fleet.started.watch import pages_of
from kvell.front.affinity import Affinity
from kvell.front.dispatch import Command, Dispatch
from kvell.front.events.index_observer import IndexObserver
from kvell.front.instance_load import InstanceLoad
from kvell.front.mailbox import Output
from kvell.front.request_log import LogEntry, RequestDetails, RequestObserver
from kvell.front.request_names import RequestNames
from kvell.front.request_queue import RequestQueue
from kvell.front.waiting_line import Entries
from kvell.vocabulary import RequestId
from kvell.wire.frames import ProtocolError

FrontState = Literal["starting", "serving", "restarting", "failing", "failed", "closing"]
ONE_MIXED: Mapping[str, int] = {"mixed": 1}


class Front:
    """``async with Front(command) as front: async for output in front.generate(…)``.

    :param command: an instance's command line.  Filled in at each start are the arguments
        ``{socket_fd}`` (needed), ``{incarnation}``, ``{processors}``, ``{threads}``,
        ``{memory_parts}`` and ``{weights_fd}``; none if the front joins a cluster.
    :param instances: how many of each role to start.
    :param routing: which instance gets a request (:data:`kvell.cluster.routing.policies.ROUTINGS`).
    :param observer: is told of each request's times.
    :param place: is taken while a single instance serves, and given back while one is started.
    :param joins: a cluster whose manager starts the instances in place of the front.
    :param index_observer: is told what instances cache; they tell nothing if there is none.
    :param pool: how the instances share their memory.
    :ivar reach_tokens: returns the most tokens of a request, while others lend all that they can.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        *,
        instances: Mapping[str, int] = ONE_MIXED,
        routing: str = DEFAULT_ROUTING,
        limits: FrontLimits | None = None,
        observer: RequestObserver | None = None,
        clock: Clock | None = None,
        place: Affinity | None = None,
        index_observer: IndexObserver | None = None,
        pool: PoolSettings | None = None,
        joins: Joins | None = None,
    ) -> None:
        self._index_observer = index_observer
        self.routing = routing
        self._limits = limits or FrontLimits()
        self._instances = dict(instances)
        self._place = place
        self._clock = clock or MonotonicClock()
        self._names = RequestNames("" if joins is None else joins.name)
        adapts = joins is None and pool is not None and pool.adaptive_roles
        self._request_queue = RequestQueue(
            self._limits.max_waiting,
            observer,
            router_named(routing),
            pulls=pool is None or pool.pd_caching > 0,
            locality=PrefixDirectory() if routing in BY_LOCALITY else None,
            roles=RoleChanger() if adapts else None,
            steers=joins is None,
        )
        self.reach_tokens = self._request_queue.placements.reach_tokens
        callbacks = MemberCallbacks(
            self._instance_ready,
            self._instance_said,
            self._instance_lost,
            self._instance_given_up,
            self._instance_leaving,
            self._instance_gone,
            self._instance_cut,
            self._instance_role,
            self._move_ordered,
        )
        self._members: Fleet
        if joins is None:
            self._members = Members(command, self._limits, Host(), callbacks, pool)
        else:
            lines = self._request_queue.lines
            self._members = joins.members(self._limits, callbacks, lines)
        self._dispatch = Dispatch(self._request_queue)
        self._closing, self._started = False, False
        self._is_idle = asyncio.Event()
        self._ready: Ready | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @property
    def state(self) -> FrontState:
        """Only ``serving`` is healthy: at least one instance serves."""
        if self._closing:
            return "closing"
        states = {one.supervisor.state for one in self._members}
        for state in ("serving", "restarting", "starting", "failing"):
            if state in states:
                return state
        return "failed" if states else "starting"

    @property
    def ready(self) -> Ready:
        """What the first instance that was ready said of itself; they are alike.

        :raises InstanceDied: before the first was ready.
        """
        if self._ready is None:
            raise InstanceDied("no instance was ready yet")
        return self._ready

    @property
    def waiting(self) -> int:
        """Requests that wait for an instance."""
        return self._request_queue.waiting

    @property
    def in_flight(self) -> int:
        """Requests that instances hold."""
        return self._request_queue.in_flight

    @property
    def room(self) -> int:
        """Requests that would be let in now."""
        return self._request_queue.room

    def instances(self) -> list[tuple[MemberStatus, InstanceLoad]]:
        """Every instance as operators see it, with its line."""
        return [(one.status(), self._request_queue.line(one.instance_id)) for one in self._members]

    async def start(self) -> None:
        """Start the instances, or join those that there are, and wait until all are ready.

        :raises InstanceStartError: when one does not become ready.
        """
        await self._members.start(self._instances)
        self._started = True

    async def close(self) -> None:
        """Refuse what waits, let what runs end within the deadline, end the instances."""
        self._closing = self._dispatch.is_closing = True
        self._request_queue.fail_waiting("the server is shutting down", self.now_seconds())
        if self._members.outlives_front:  # the instances go on, so the requests are waited for here
            self._note_idle()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), self._limits.drain_seconds)
        await self._members.close()

    async def scale(self, instances: Mapping[str, int]) -> None:
        """Add or drain instances until each role named has so many; they start or end later.

        :raises ChangeSomething: when the host has no memory for more.
        :raises InstanceDied: when the front is closing.
        :raises TryLater: when the cluster's manager is away.
        """
        self._require_open()
        await self._members.scale(instances)
        self._take_place()

    async def drain(self, instance_id: str) -> None:
        """Take an instance out of service: others go on with what it has, or it finishes that.

        :raises ChangeSomething: when there is none of this id, or it is the last that serves.
        :raises InstanceDied: when the front is closing.
        :raises TryLater: when the cluster's manager is away.
        """
        self._require_open()
        await self._members.drain(instance_id)

    def own(self) -> Members:
        """Return the instances that this front has started, which it scales and drains at once.

        :raises InstanceDied: when the front is closing.
        """
        assert isinstance(self._members, Members), "the manager must be asked"
        self._require_open()
        return self._members

    async def generate(
        self,
        prompt: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        deadline_seconds: float | None = None,
        **details: Unpack[RequestDetails],
    ) -> AsyncGenerator[Output, None]:
        """Serve a prompt (int32 ``[tokens]``); the last output carries ``finished``.

        Closing the generator early cancels the request.

        :param deadline_seconds: from now until the caller gives it up, which the router is told;
            None: never.
        :param details: what else is said of it.
        :raises TryLater: when the waiting line is full.
        :raises InstanceDied: when no instance serves just now.
        """
        if self.state != "serving":
            raise InstanceDied(f"no instance serves just now ({self.state})")
        if sampling.seed is None:
            # Drawn here and logged, so that a second attempt would draw the same tokens.
            sampling = replace(sampling, seed=secrets.randbelow(MAX_SEED))
        now = self.now_seconds()
        entry = LogEntry(
            self._names.known(request_id or uuid.uuid4().hex),
            np.ascontiguousarray(prompt, dtype="<i4").tobytes(),
            sampling,
            cache_salt,
            now,
            prefix=self._names.prefix,
            due_seconds=None if deadline_seconds is None else now + deadline_seconds,
            **details,
        )
        self._tell(self._dispatch.added(entry, now))
        ended = False
        try:
            while not ended:
                output = await entry.mailbox.take()
                ended = output.finished is not None
                yield output
        finally:
            if not ended:
                self._drop(entry.request_id, "cancelled")

    def stop(self, request_id: str) -> None:
        """End a request on purpose; its last output says ``stop``."""
        self._drop(self._names.known(request_id), "stop")

    def cancel(self, request_id: str) -> None:
        """End a request that nobody waits for any more; its last output says ``cancelled``."""
        self._drop(self._names.known(request_id), "cancelled")

    async def stats(
        self, deadline_seconds: float = 5.0, *, with_audit: bool = False
    ) -> dict[str, Stats]:
        """Counters of every instance that serves and answers in time, by id.

        :param with_audit: ask for ``problems`` too, which costs each instance some time.
        :raises InstanceDied: when no instance serves just now.
        :raises TryLater: when none answers in time.
        """
        serving = [one for one in self._members if one.is_serving]
        if not serving:
            raise InstanceDied(f"no instance serves just now ({self.state})")
        return await stats_of(serving, deadline_seconds, with_audit=with_audit)

    def forget_prefixes(self) -> int:
        """Let every instance that serves evict its cached prefixes; return their number."""
        return sum(one.forget_prefixes() for one in self._members if one.is_serving)

    async def pages(self, deadline_seconds: float) -> dict[str, Pages]:
        """Every large page of the instances that serve and answer in time, by id."""
        serving = [(one.instance_id, one.watch) for one in self._members if one.is_serving]
        found = (await pages_of(serving, deadline_seconds)).items()
        return {instance_id: self._names.pages(one) for instance_id, one in found}

    async def large_page(
        self, instance_id: str, number: int, deadline_seconds: float
    ) -> LargePage | None:
        """One large page of an instance; None if no instance of this id serves.

        :raises InstanceDied: when it dies meanwhile.
        :raises TryLater: when it does not answer in time.
        """
        for one in self._members:
            if one.instance_id == instance_id and one.is_serving:
                return self._names.large_page(await one.watch.large_page(number, deadline_seconds))
        return None

    def entries(self) -> Entries:
        """Requests that did not end yet."""
        return self._request_queue.entries()

    def now_seconds(self) -> float:
        """The time by the clock of the requests' log."""
        return self._clock.now_seconds()

    def _instance_ready(self, instance_id: str, ready: Ready) -> None:
        self._ready = self._ready or ready
        others = any(one.is_serving for one in self._members if one.instance_id != instance_id)
        told = self._dispatch.ready(
            *(instance_id, ready.credits, ready.incarnation, self.now_seconds()),
            free_bytes=ready.kv_pool_bytes,
            token_bytes=ready.token_bytes,
            joins_others=others and self._started,
            reach=Reach.of(ready),
            indexed=ready.indexed,
            watches=None if self._index_observer is None else WatchIndex(),
        )
        self._take_place()
        self._tell(told)

    def _instance_said(self, instance_id: str, event: Event) -> None:
        if isinstance(event, IndexNotice) and self._index_observer is not None:
            self._index_observer.noticed(instance_id, event)
        self._tell(self._dispatch.said(instance_id, (event,), self.now_seconds()))
        self._note_idle()

    def _instance_lost(self, instance_id: str, death: InstanceDeath) -> None:
        """Give its requests to others, which go on behind what was emitted."""
        if self._place is not None:
            self._place.give_back()
        self._index_lost(instance_id)
        cause = CLOSING if self._closing else death
        self._tell(self._dispatch.lost(instance_id, cause, self.now_seconds()))
        self._note_idle()

    def _instance_given_up(self, _instance_id: str) -> None:
        if all(one.is_given_up for one in self._members):
            self._request_queue.fail_waiting("the instance cannot be restarted", self.now_seconds())

    def _instance_leaving(self, instance_id: str) -> None:
        self._tell(self._dispatch.leaving(instance_id))

    def _instance_gone(self, instance_id: str) -> None:
        self._index_lost(instance_id)
        self._request_queue.remove_line(instance_id)
        self._take_place()

    def _instance_cut(self, instance_id: str) -> None:
        self._request_queue.line(instance_id).close()

    def _instance_role(self, instance_id: str, role: str) -> None:
        self._tell(self._request_queue.set_roles([(instance_id, role)]))

    def _move_ordered(self, request_id: str, target: str, num_blocks: int) -> None:
        self._tell(self._request_queue.move(request_id, target, num_blocks))

    def _index_lost(self, instance_id: str) -> None:
        if self._index_observer is not None:
            self._index_observer.lost(instance_id)

    def _take_place(self) -> None:
        is_single = len(self._members) == 1 and self.state == "serving"
        if self._place is not None:
            (self._place.take if is_single else self._place.give_back)()

    def _note_idle(self) -> None:
        """Say once, while the front closes, that no instance has a request of it."""
        if self._closing and not self._request_queue.in_flight:
            self._is_idle.set()

    def _require_open(self) -> None:
        if self._closing:
            raise InstanceDied("the server is shutting down")

    def _drop(self, request_id: RequestId, end_as: Literal["cancelled", "stop"]) -> None:
        self._tell(self._dispatch.dropped(request_id, end_as, self.now_seconds()))

    def _tell(self, commands: Iterable[tuple[str, Command]]) -> None:
        for instance_id, command in commands:
            if isinstance(command, Submit):
                self._submit(instance_id, command)
            elif instance_id in self._members:
                with suppress(InstanceDied):
                    self._members[instance_id].supervisor.send(command)

    def _submit(self, instance_id: str, submission: Submit) -> None:
        try:
            self._members[instance_id].supervisor.send(submission)
        except ProtocolError as error:
            request_id, attempt = submission.request_id, submission.attempt
            refusal = Finished(request_id, attempt, "refused", message=str(error))
            self._request_queue.finished(refusal, self.now_seconds())
