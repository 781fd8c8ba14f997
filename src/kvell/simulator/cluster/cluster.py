"""Instances behind a front in virtual time: their own code, with clock, device and links swapped.

::

    trace ─► VirtualFront ──Submit, Cancel──► VirtualInstance ◄─messages, pages─► VirtualInstance
             RequestQueue ◄──── events ──── EngineCore, Agent     Network
             router                           StepTimer, Device

Everything happens in one loop, in order of virtual time, so equal runs are equal.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from msgspec import structs

from kvell.clock import Clock, MonotonicClock
from kvell.cluster.prefix_directory import BY_LOCALITY, PrefixDirectory
from kvell.cluster.routed_request import Cause, InstanceDeath
from kvell.cluster.routing.policies import DEFAULT_ROUTING, router_named
from kvell.cluster.steering.relief import DEFAULT_RELIEF, Relief
from kvell.cluster.steering.steering import RoleChanger, RoleRules
from kvell.cost.prices import USUAL_PRICES, ExecCosts
from kvell.engine.core.core import EngineCore
from kvell.engine.core.index_watch import indexed_groups
from kvell.engine.core.lateness import LatenessWatch
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.lending.distributed_request import section_bytes
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.protocol.messages import CREDITS, HEARTBEAT_SECONDS, Event
from kvell.engine.protocol.notices import IndexNotice
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.engine.requests.limits import Limits
from kvell.front.request_queue import Command, RequestQueue
from kvell.memory import Eviction, GroupKind, HoldingCore, Layout, MemoryCore, create_core
from kvell.mempool.agent import Agent
from kvell.mempool.rendezvous import DEFAULT_PD_CACHING, PdCaching
from kvell.mempool.transfers.methods import StreamCosts
from kvell.simulator.clock.links import Link
from kvell.simulator.clock.transport import VirtualTransport
from kvell.simulator.cluster.device import Device
from kvell.simulator.cluster.front import VirtualFront
from kvell.simulator.cluster.instance import (
    IN_ONE_MEMORY,
    Links,
    NeighbourReads,
    Network,
    PricedSteps,
    Record,
    VirtualInstance,
)
from kvell.simulator.cluster.loop import Loop
from kvell.simulator.cluster.meter import InstanceMeter, Metering, moment_of
from kvell.simulator.replay.runner import Acceptance, StepTimer
from kvell.simulator.replay.schedule import Arrivals, Schedule
from kvell.simulator.report.timeline import Moment
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import TraceRow

ALONE = {"mixed": 1}
"""One instance."""


@dataclass(frozen=True)
class ClusterSpec:
    """The parameters of a cluster.

    :param counts: instances by role, like ``{"prefill": 1, "decode": 2}``.
    :param links: between instances; None: there are none, and no request moves.
    :param pd_caching: the content that each role caches; with 0 mixed instances cache nothing
        either.
    :param role_rules: when instances change their roles by load; None: never.
    :param max_waiting: requests that wait for a credit; None: any number.
    :param front_seconds: latency of messages between the front and an instance, by instance; they
        arrive in order, and are never lost.
    :param notice_seconds: extra latency of notices of the index; ``notice_loss`` is the part of
        them that never arrives.
    :param restart_seconds: from an instance's death to the next incarnation.
    :param streams: cost of pulls that begin before a step has ended; None: no pull does.
    :param hosts: hosts of instances that are not on the common host, by name: instances of one host
        lend each other memory. None: no instance lends, as if no pool were in host memory.
    :param reads: cost of pages that are read in place at other instances.
    :param asks: whether instances of other hosts are asked for attention over what they lend, at
        the prices of ``costs``.
    :param steers: whether the front decides on roles, moves and loans.
    :param moves: the moves that it decides on while memory is short.
    """

    counts: Mapping[str, int]
    layout: Layout
    limits: Limits
    machine: StepTimer
    links: Links | None = None
    routing: str = DEFAULT_ROUTING
    pd_caching: PdCaching = DEFAULT_PD_CACHING
    costs: ExecCosts = USUAL_PRICES
    role_rules: RoleRules | None = None
    eviction: Eviction = "lru"
    max_waiting: int | None = None
    front_seconds: Mapping[str, float] = field(default_factory=dict)
    notice_seconds: float = 0.0
    notice_loss: float = 0.0
    restart_seconds: float = 1.0
    seed: int = 0
    streams: StreamCosts | None = None
    hosts: Mapping[str, str] | None = field(default_factory=dict)
    reads: NeighbourReads = IN_ONE_MEMORY
    asks: bool = False
    steers: bool = True
    moves: Relief = DEFAULT_RELIEF


@dataclass(frozen=True)
class EngineParts:
    """The optional parts of each incarnation's engine; all are made for it.

    :param core: the memory core, which is empty; None: as ``ClusterSpec`` says.
    :param parking: the component that prefills ahead of decodes.
    :param buffer_large: number of the buffer's first large page, counted from the pool's first, if
        prompts may be computed into it.
    """

    core: Callable[[], HoldingCore] | None = None
    memory: Callable[[MemoryCore], StepMemory] | None = None
    swapping: Callable[[MemoryCore], Swapping] | None = None
    parking: Callable[[MemoryCore, Swapping], Parking] | None = None
    lateness: Callable[[], LatenessWatch] | None = None
    buffer_large: int | None = None


MakeDevice = Callable[[EngineCore], Device]


NO_PARTS = EngineParts()
REAL_TIME = MonotonicClock()


class VirtualCluster:
    """One run of one trace; call :meth:`run`, or :meth:`go_on` to the end.

    :param device: makes the pages and the model of each incarnation; by default they answer with
        the trace's tokens.
    :param records: whether each incarnation records its inputs and its decisions.
    :param locality: the router's record of caches; by default as the routing needs it.
    :ivar instances: live instances, by name.
    :ivar past: dead instances, in order.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        rows: Sequence[TraceRow],
        arrivals: Arrivals = "trace",
        *,
        sessions: bool = True,
        prompts: PromptMaker | None = None,
        device: MakeDevice | None = None,
        records: bool = False,
        locality: PrefixDirectory | None = None,
        parts: EngineParts = NO_PARTS,
        metering: Metering | None = None,
        acceptance: Acceptance | None = None,
        wall: Clock = REAL_TIME,
    ) -> None:
        self.spec = spec
        self.loop = Loop()
        self._links = spec.links or Links(Link())
        self.transport = VirtualTransport(self._links.messages, spec.seed)
        page_bytes = [group.page_stride_bytes for group in spec.layout.groups]
        self.network = Network(self.loop, self.transport, self._links, page_bytes, spec.hosts)
        asks = spec.asks and spec.hosts is not None
        self._steps = PricedSteps(spec.machine, spec.costs, self.network, asks)
        self._parts, self._metering = parts, metering
        self._wall = wall
        self.wall_seconds = 0.0
        self._prompts = prompts or PromptMaker(rows)
        self._device: MakeDevice = device or (lambda _: Device(self._prompts, acceptance))
        self._records = records
        self.instances: dict[str, VirtualInstance] = {}
        self.past: list[VirtualInstance] = []
        self.on_started: Callable[[VirtualInstance], None] = lambda _: None
        """Called with each incarnation when it begins."""
        self._incarnations = itertools.count(1)
        self._chance = Random(spec.seed)
        self._will_beat = False
        schedule = Schedule(rows, arrivals, partial(self._is_served, rows), sessions=sessions)
        self.names = [f"{role}-{i}" for role, count in spec.counts.items() for i in range(count)]
        # No front bounds the requests of a lone engine; its next step is the same however many wait
        # beyond those that it could admit.
        self._is_alone = spec.links is None and len(self.names) == 1
        self._credits = len(rows) if self._is_alone else CREDITS
        most_ahead = spec.limits.max_num_seqs if self._is_alone else CREDITS * len(self.names)
        self.front = VirtualFront(
            _queue_of(spec, len(rows), locality),
            rows,
            self._prompts,
            schedule,
            self.loop,
            self._tell,
            spec.machine.request_seconds,
            most_ahead if spec.max_waiting is None else None,
        )

    def start(self) -> None:
        for name in self.names:
            self._start(name)

    def run(self, progress: Callable[[float], None] = lambda _: None) -> None:
        began_seconds = self._wall.now_seconds()
        self.start()
        num_requests = len(self.front.requests)
        num_done = 0
        while self.front.num_done < num_requests and self.go_on():
            if num_done != self.front.num_done:
                num_done = self.front.num_done
                progress(num_done / num_requests)
        if self.front.num_done < num_requests:
            raise RuntimeError("requests wait, but no event is scheduled")
        self.wall_seconds = self._wall.now_seconds() - began_seconds

    def go_on(self) -> bool:
        """Run the next event; return False once there is none."""
        at_seconds = self.loop.next_seconds(self.transport)
        if at_seconds is None:
            return False
        has_run = self.loop.advance(at_seconds) or self.network.deliver()
        if not has_run and self.loop.last:
            self.loop.last.popleft()()
        return True

    # --------------------------------------------------------------------- faults

    def crash(self, name: str, cause: Cause = "killed") -> None:
        dead = self.instances.pop(name, None)
        if dead is None:
            return
        dead.die()
        self.past.append(dead)
        if not dead.is_alone:
            self.network.leave(dead)
        death = InstanceDeath(f"{name} ended unexpectedly", cause)
        self.loop.after(self._front_seconds(name), partial(self.front.lost, name, death))
        # The other instances see the death first, as a new connection would make them.
        pause_seconds = max(self.spec.restart_seconds, self._links.hang_up_seconds)
        self.loop.after(pause_seconds, partial(self._start, name))

    def pause(self, name: str, seconds: float) -> None:
        if name in self.instances:
            self.instances[name].pause(seconds)

    # -------------------------------------------------------------------- instances

    def fresh_core(self, name: str, incarnation: int) -> tuple[EngineCore, Agent, InstanceMeter]:
        spec, parts = self.spec, self._parts
        memory = parts.core() if parts.core else create_core(spec.layout, spec.eviction)
        agent = Agent(memory, name, incarnation, "virtual")
        lateness = parts.lateness and parts.lateness()
        meter = InstanceMeter(memory, self.front, self._metering, lateness, self._on_sampled)
        swapping = parts.swapping and parts.swapping(meter.core)
        core = meter.engine = EngineCore(
            meter.core,
            spec.limits,
            frozenset(),
            incarnation,
            memory=parts.memory and parts.memory(meter.core),
            swapping=swapping,
            parking=parts.parking(meter.core, swapping) if parts.parking and swapping else None,
            agent=agent if spec.links else None,
            pd_caching=spec.pd_caching,
            streams=spec.streams,
            buffer_large=parts.buffer_large,
        )
        return core, agent, meter

    def _start(self, name: str) -> None:
        incarnation = next(self._incarnations)
        core, agent, meter = self.fresh_core(name, incarnation)
        instance = VirtualInstance(
            core,
            agent,
            self._device(core),
            self._steps,
            self.loop,
            self.network,
            partial(self._say, name),
            meter,
            Record() if self._records else None,
            reads=self.spec.reads,
            beats=not self._is_alone,
        )
        self.instances[name] = instance
        if not instance.is_alone:
            self.network.enter(instance)
        self.on_started(instance)
        is_first = incarnation <= len(self.names)
        facts = self._facts(name, incarnation)
        ready = partial(self.front.ready, name, facts, joins_others=not is_first)
        if is_first:  # a front accepts requests once all of these are ready
            ready()
        else:
            self.loop.after(self._front_seconds(name), ready)

    def _say(self, name: str, events: Sequence[Event]) -> None:
        late_seconds = self.spec.notice_seconds
        if late_seconds or self.spec.notice_loss:
            notices = [event for event in events if isinstance(event, IndexNotice)]
            events = [event for event in events if not isinstance(event, IndexNotice)]
            kept = [event for event in notices if self._chance.random() >= self.spec.notice_loss]
            if kept:
                says = partial(self._notice, name, self.instances[name].incarnation, kept)
                self.loop.after(self._front_seconds(name) + late_seconds, says)
        if events:
            step = self.instances[name].core.step
            arrive = partial(self.front.on_events, name, events, step)
            self.loop.after(self._front_seconds(name), arrive)

    def _on_sampled(self) -> None:
        if self._metering is not None and self._metering.timeline is not None:
            self._metering.timeline.offer(self._moment)

    def _moment(self) -> Moment:
        meters = [instance.meter for instance in self.instances.values()]
        return moment_of(meters, self.loop.now_seconds, self.front.num_arrived)

    def _notice(self, name: str, incarnation: int, notices: Sequence[Event]) -> None:
        if self.front.queue.line(name).incarnation == incarnation:
            self.front.on_events(name, notices)

    def _tell(self, name: str, command: Command) -> None:
        instance = self.instances.get(name)
        if instance is not None:
            self.loop.after(self._front_seconds(name), partial(instance.take, command))
            self._beat_later()

    def _beat_later(self) -> None:
        if not self._will_beat and not self._is_alone:
            self._will_beat = True
            self.loop.after(HEARTBEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        """Let idle instances send heartbeats while requests and other events remain.

        A fleet at rest costs no virtual time.
        """
        self._will_beat = False
        is_last = self.loop.next_seconds(self.transport) is None
        for instance in list(self.instances.values()):
            instance.beat()
        if not is_last and (self.front.queue.in_flight or self.front.queue.waiting):
            self._beat_later()

    def _facts(self, name: str, incarnation: int) -> InstanceFacts:
        """Return the facts of an incarnation, as an instance process would report them."""
        layout, limits, hosts = self.spec.layout, self.spec.limits, self.spec.hosts
        facts = InstanceFacts(
            incarnation,
            self._credits,
            "",
            limits.max_model_len,
            layout.pool_bytes,
            token_bytes=_token_bytes(layout),
            indexed=indexed_groups(layout.groups),
            section_tokens=limits.section_tokens,
            prices=self.spec.costs,
        )
        if hosts is None or self.spec.links is None:
            return facts
        return structs.replace(
            facts,
            reach_tokens=limits.reach_tokens,
            section_bytes=section_bytes(layout.groups, limits.section_tokens),
            host=hosts.get(name, ""),
            is_asked=self.spec.asks,
        )

    def _front_seconds(self, name: str) -> float:
        return self.spec.front_seconds.get(name, 0.0)

    def _is_served(self, rows: Sequence[TraceRow], index: int) -> bool:
        limits = self.spec.limits
        num_tokens = self._prompts.place(index).prompt_tokens + rows[index].output_tokens
        return num_tokens <= max(limits.max_model_len, limits.reach_tokens)


def _token_bytes(layout: Layout) -> int:
    return sum(
        group.page_stride_bytes // group.page_tokens
        for group in layout.groups
        if group.kind is not GroupKind.STATE
    )


def _queue_of(
    spec: ClusterSpec, num_requests: int, locality: PrefixDirectory | None
) -> RequestQueue:
    return RequestQueue(
        num_requests if spec.max_waiting is None else spec.max_waiting,
        router=router_named(spec.routing),
        pulls=spec.links is not None and spec.pd_caching > 0,
        locality=locality or (PrefixDirectory() if spec.routing in BY_LOCALITY else None),
        roles=None if spec.role_rules is None else RoleChanger(spec.role_rules),
        steers=spec.steers,
        moves=spec.moves,
    )
