"""The front: gives each request its own output, whatever happens to the instances.

The front's thread avoids the processor of the thread that plans and computes.  Each token wakes
the front, and the operating system tends to run it on the processor of the process that woke it:
the instance's own thread, which then waits until the front is done while another is idle.

A request has a name for its caller and one for instances.  Several fronts may have the same
instances, and their clients choose names freely.  So the name at instances is
``front-3f9a12cc:name``, and the name that people see is without the front.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

from msgspec import structs

from kvell.clock import Clock, MonotonicClock
from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.instances import ONE_MIXED
from kvell.cluster.prefix_directory import BY_LOCALITY, PrefixDirectory
from kvell.cluster.routed_request import InstanceDeath
from kvell.cluster.routing.policies import DEFAULT_ROUTING, router_named
from kvell.cluster.steering.relief import DEFAULT_RELIEF
from kvell.cluster.steering.steering import RoleChanger
from kvell.engine.protocol.messages import Event, Finished, Submit
from kvell.engine.protocol.notices import IndexNotice, WatchIndex
from kvell.engine.protocol.pages import LargePage, Pages
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SeedSource
from kvell.engine.protocol.statistics import InstanceFacts, Stats
from kvell.errors import InstanceDied
from kvell.fleet.fleet import (
    CLOSING,
    GIVEN_UP,
    Fleet,
    Handle,
    MemberCallbacks,
    MemberStatus,
    stats_of,
)
from kvell.fleet.instance.watch import pages_of
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.host import Host
from kvell.fleet.started.members import Members
from kvell.fleet.started.pool_settings import PoolSettings
from kvell.front.events.index_observer import IndexObserver
from kvell.front.request_log import (
    LogEntry,
    Mailbox,
    Output,
    OutputRoom,
    RequestObserver,
    RequestTrace,
)
from kvell.front.request_queue import Command, Entries, RequestQueue
from kvell.serving.gate import NAME_END
from kvell.vocabulary import RequestId
from kvell.wire.frames import ProtocolError

if TYPE_CHECKING:
    from kvell.fleet.followed.followed_members import FollowedCluster


class RequestNames:
    """Names of one front's requests; pure.

    :param front: name of the front; "" if its instances have no other: then the names are equal.
    """

    def __init__(self, front: str = "") -> None:
        self.prefix = f"{front}{NAME_END}" if front else ""

    def known(self, shown: str) -> RequestId:
        return RequestId(self.prefix + shown)

    def shorten(self, name: RequestId) -> RequestId:
        """Return the name that people see; names of other fronts stay whole."""
        return RequestId(name.removeprefix(self.prefix))

    def pages(self, pages: Pages) -> Pages:
        if not self.prefix or not pages.misses:
            return pages
        misses = (replace(miss, request_id=self.shorten(miss.request_id)) for miss in pages.misses)
        return replace(pages, misses=tuple(misses))

    def large_page(self, page: LargePage) -> LargePage:
        """Return a large page, with the names that people see."""
        if not self.prefix:
            return page
        owners = (
            replace(owner, request_id=self.shorten(owner.request_id)) for owner in page.owners
        )
        return replace(page, owners=tuple(owners))


class Affinity:
    """The processor affinity of the thread that makes and calls this object.

    A pass has its caller on the first processor (``csrc/forward/places.h``).  Processes that are
    started meanwhile would inherit the affinity, so it is set only while none is started.
    """

    def __init__(self) -> None:
        has_places = hasattr(os, "sched_getaffinity")
        self._all = frozenset(os.sched_getaffinity(0)) if has_places else frozenset[int]()

    def take(self) -> None:
        self._run_on(self._all - {min(self._all, default=0)})

    def give_back(self) -> None:
        """Run on all processors that the thread had."""
        self._run_on(self._all)

    def _run_on(self, processors: frozenset[int]) -> None:
        if processors:
            with contextlib.suppress(OSError):  # no longer permitted: the system decides
                os.sched_setaffinity(0, processors)


FrontState = Literal["starting", "serving", "restarting", "failing", "failed", "closing"]


class Front:
    """``async with Front(command) as front: async for output in front.generate(…)``.

    :param command: an instance's command line, empty if the front joins a cluster.  At each start
        its arguments ``{socket_fd}`` (required), ``{incarnation}``, ``{processors}``,
        ``{threads}``, ``{memory_parts}`` and ``{weights_fd}`` are filled in.
    :param routing: one of :data:`kvell.cluster.routing.policies.ROUTINGS`.
    :param place: taken while a single instance serves, and given back while one is started.
    :param joins: a cluster whose manager starts the instances in place of the front.
    :param seed: seed of the requests that have none; see
        :class:`~kvell.engine.protocol.sampling_params.SeedSource`.
    :param index_observer: receives what instances cache; None: it is not reported.
    :ivar reach_tokens: returns the most tokens of a request while others lend all that they can.
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
        joins: "FollowedCluster | None" = None,
        seed: int | None = None,
    ) -> None:
        self._seeds = SeedSource(seed)
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
            pulls=pool is None or pool.caching > 0,
            locality=PrefixDirectory() if routing in BY_LOCALITY else None,
            roles=RoleChanger() if adapts else None,
            steers=joins is None,
            moves=DEFAULT_RELIEF if pool is None else pool.relief,
        )
        self.reach_tokens = self._request_queue.placements.reach_tokens
        callbacks = MemberCallbacks(
            self._instance_ready,
            self._instance_said,
            self._instance_lost,
            self._instance_given_up,
            lambda name: self._tell(self._request_queue.leaving(name, self.now_seconds())),
            self._instance_gone,
            lambda name: self._request_queue.line(name).close(),
            lambda name, role: self._tell(self._request_queue.set_roles([(name, role)])),
            lambda request, target, n: self._tell(self._request_queue.move(request, target, n)),
        )
        self._members: Fleet[Handle]
        if joins is None:
            self._members = Members(command, self._limits, Host(), callbacks, pool)
        else:
            self._members = joins.members(self._limits, callbacks, self._request_queue.lines)
        self._closing, self._started = False, False
        self._is_idle = asyncio.Event()
        self._facts: InstanceFacts | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @property
    def state(self) -> FrontState:
        """The state; only ``serving`` is healthy: at least one instance serves."""
        if self._closing:
            return "closing"
        states = {member.supervisor.state for member in self._members}
        for state in ("serving", "restarting", "starting", "failing"):
            if state in states:
                return state
        return "failed" if states else "starting"

    @property
    def facts(self) -> InstanceFacts:
        """The facts of the first instance that was ready; all instances are alike.

        :raises InstanceDied: before the first was ready.
        """
        if self._facts is None:
            raise InstanceDied("no instance was ready yet")
        return self._facts

    @property
    def waiting(self) -> int:
        return self._request_queue.waiting

    @property
    def in_flight(self) -> int:
        return self._request_queue.in_flight

    @property
    def room(self) -> int:
        return self._request_queue.room

    def instances(self) -> list[tuple[MemberStatus, InstanceLoad]]:
        return [
            (member.status(), self._request_queue.line(member.instance_id))
            for member in self._members
        ]

    async def start(self) -> None:
        """Start the instances, or join a cluster, and wait until all are ready.

        :raises InstanceStartError: when an instance does not become ready.
        """
        await self._members.start(self._instances)
        self._started = True

    async def close(self) -> None:
        """Reject waiting requests, let running ones end within the deadline, end the instances."""
        self._closing = self._request_queue.is_closing = True
        self._request_queue.fail_waiting("the server is shutting down", self.now_seconds())
        if self._members.outlives_front:  # instances keep running, so requests are awaited here
            self._note_idle()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), self._limits.drain_seconds)
        await self._members.close()

    def scale(self, instances: Mapping[str, int]) -> "asyncio.Future[None]":
        """Add or drain instances until each role in ``instances`` has its number; do not wait.

        :returns: done once the cluster's manager has answered, or immediately without one.
        :raises ChangeSomething: when the host has no memory for more.
        :raises InstanceDied: when the front is closing.
        :raises TryLater: when the cluster's manager does not answer.
        """
        self._require_open()
        answered = self._members.scale(instances)
        self._take_place()
        return answered

    def drain(self, instance_id: str) -> "asyncio.Future[None]":
        """Take an instance out of service; others continue its requests, or it finishes them.

        :returns: done like that of :meth:`scale`.
        :raises ChangeSomething: when no instance has this id, or it is the last that serves.
        :raises InstanceDied: when the front is closing.
        :raises TryLater: when the cluster's manager does not answer.
        """
        self._require_open()
        return self._members.drain(instance_id)

    async def generate(
        self,
        spec: RequestSpec,
        *,
        deadline_seconds: float | None = None,
        trace: RequestTrace | None = None,
        room: OutputRoom | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Serve a request; the last output carries ``finished``.

        Closing the generator early cancels the request.

        :param spec: its ``request_id`` is the caller's.
        :param deadline_seconds: time until the caller gives up, for the router; None: no deadline.
        :param room: memory for the output until it is read; None: it is not counted.
        :raises TryLater: when the queue is full, or there is no room for the output.
        :raises InstanceDied: when no instance serves now.
        """
        if self.state != "serving":
            raise InstanceDied(f"no instance serves now ({self.state})")
        # Drawn here and logged, so that a second attempt would draw the same tokens.
        sampling = self._seeds.with_seed(spec.sampling)
        name = RequestId(self._names.prefix + spec.request_id)
        if sampling is not spec.sampling or name != spec.request_id:
            spec = structs.replace(spec, sampling=sampling, request_id=name)
        now = self._clock.now_seconds()
        loop = asyncio.get_running_loop()
        entry = LogEntry(
            spec,
            now,
            prefix=self._names.prefix,
            due_seconds=None if deadline_seconds is None else now + deadline_seconds,
            trace=trace,
            mailbox=Mailbox(room, partial(loop.call_soon, self._drop, name, "cancelled")),
        )
        self._request_queue.add(entry)
        self._tell(self._request_queue.due(now))
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
        """End a request on purpose; its last output has the reason ``stop``."""
        self._drop(self._names.known(request_id), "stop")

    def cancel(self, request_id: str) -> None:
        """End a request whose caller is gone; its last output has the reason ``cancelled``."""
        self._drop(self._names.known(request_id), "cancelled")

    async def stats(
        self, deadline_seconds: float = 5.0, *, with_audit: bool = False
    ) -> dict[str, Stats]:
        """Return the counters of every instance that serves and answers in time, by id.

        :param with_audit: whether to include ``problems``, which costs each instance some time.
        :raises InstanceDied: when no instance serves now.
        :raises TryLater: when no instance answers in time.
        """
        serving = [member for member in self._members if member.is_serving]
        if not serving:
            raise InstanceDied(f"no instance serves now ({self.state})")
        return await stats_of(serving, deadline_seconds, with_audit=with_audit)

    def forget_prefixes(self) -> int:
        """Let every instance that serves evict its cached prefixes; return their number."""
        return sum(member.forget_prefixes() for member in self._members if member.is_serving)

    async def pages(self, deadline_seconds: float) -> dict[str, Pages]:
        serving = [
            (member.instance_id, member.watch) for member in self._members if member.is_serving
        ]
        answers = (await pages_of(serving, deadline_seconds)).items()
        return {instance_id: self._names.pages(pages) for instance_id, pages in answers}

    async def large_page(
        self, instance_id: str, number: int, deadline_seconds: float
    ) -> LargePage | None:
        """Return a large page of an instance; None if no instance of this id serves.

        :raises InstanceDied: when the instance dies meanwhile.
        :raises TryLater: when the instance does not answer in time.
        """
        for member in self._members:
            if member.instance_id == instance_id and member.is_serving:
                return self._names.large_page(
                    await member.watch.large_page(number, deadline_seconds)
                )
        return None

    def entries(self) -> Entries:
        return self._request_queue.entries()

    def now_seconds(self) -> float:
        return self._clock.now_seconds()

    def _instance_ready(self, instance_id: str, facts: InstanceFacts) -> None:
        self._facts = self._facts or facts
        others = any(peer.is_serving for peer in self._members if peer.instance_id != instance_id)
        commands = self._request_queue.open(
            instance_id,
            facts,
            joins_others=others and self._started,
            watches=None if self._index_observer is None else WatchIndex(),
        )
        due = self._request_queue.due(self.now_seconds())
        self._take_place()
        self._tell([*commands, *due])

    def _instance_said(self, instance_id: str, event: Event) -> None:
        if isinstance(event, IndexNotice) and self._index_observer is not None:
            self._index_observer.on_notice(instance_id, event)
        commands = self._request_queue.on_events(instance_id, (event,), self._clock.now_seconds())
        if commands:
            self._tell(commands)
        if self._closing:
            self._note_idle()

    def _instance_lost(self, instance_id: str, death: InstanceDeath) -> None:
        if self._place is not None:
            self._place.give_back()
        self._index_lost(instance_id)
        cause = CLOSING if self._closing else death
        now = self.now_seconds()
        cancels = self._request_queue.lost(instance_id, cause, now)
        self._tell([*cancels, *self._request_queue.due(now)])
        self._note_idle()

    def _instance_given_up(self, instance_id: str) -> None:
        self._tell(self._request_queue.on_given_up(instance_id, self.now_seconds()))
        if self.state in GIVEN_UP:
            self._request_queue.fail_waiting("the instance cannot be restarted", self.now_seconds())

    def _instance_gone(self, instance_id: str) -> None:
        self._index_lost(instance_id)
        self._instance_given_up(instance_id)
        self._request_queue.remove_line(instance_id)
        self._take_place()

    def _index_lost(self, instance_id: str) -> None:
        if self._index_observer is not None:
            self._index_observer.lost(instance_id)

    def _take_place(self) -> None:
        is_single = len(self._members) == 1 and self.state == "serving"
        if self._place is not None:
            (self._place.take if is_single else self._place.give_back)()

    def _note_idle(self) -> None:
        if self._closing and not self._request_queue.in_flight:
            self._is_idle.set()

    def _require_open(self) -> None:
        if self._closing:
            raise InstanceDied("the server is shutting down")

    def _drop(self, request_id: RequestId, end_as: Literal["cancelled", "stop"]) -> None:
        now = self.now_seconds()
        cancels = self._request_queue.drop(request_id, end_as, now)
        self._tell([*cancels, *self._request_queue.due(now)])

    def _tell(self, commands: Iterable[tuple[str, Command]]) -> None:
        for instance_id, command in commands:
            if isinstance(command, Submit):
                self._submit(instance_id, command)
            elif instance_id in self._members:
                with contextlib.suppress(InstanceDied):
                    self._members[instance_id].supervisor.send(command)

    def _submit(self, instance_id: str, submission: Submit) -> None:
        try:
            self._members[instance_id].supervisor.send(submission)
        except ProtocolError as error:
            request_id, attempt = submission.request_id, submission.attempt
            refusal = Finished(request_id, attempt, "refused", message=str(error))
            self._request_queue.on_finished(refusal, self.now_seconds())
