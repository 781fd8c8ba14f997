"""Whole clusters under a drawn schedule: requests, faults, and what must hold whatever happens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvell.cluster.routing.policies import ROUTINGS
from kvell.cluster.steering.steering import RoleRules
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import replay
from kvell.engine.protocol.messages import Submit
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan
from kvell.memory import GroupSpec, longest_request
from kvell.mempool.rendezvous import PD_CACHINGS
from kvell.mempool.transfers.actions import Action, Pull
from kvell.mempool.transfers.methods import ALWAYS
from kvell.pages.stages import BY_LAYER
from kvell.simulator.clock.links import Link
from kvell.simulator.cluster.cluster import ClusterSpec, VirtualCluster
from kvell.simulator.cluster.instance import Input, Links, VirtualInstance
from kvell.simulator.traces.rows import TraceRow
from tests.mempool.agent_audit import audit_holds
from tests.pages.pools import Chunk, group, pool_of, state
from tests.simulator.cluster.written_pages import Texts, WrittenPages

MIXES: dict[str, list[GroupSpec]] = {
    "full": [group(4, 2)],
    "windows": [group(4, 3), group(2, 5, window=9), group(4, 1, window=5)],
    "chunks": [group(4, 2), group(2, 3, window=Chunk(8))],
    "state": [group(4, 2), state(2, 3)],
    "all": [group(4, 2), group(4, 1, window=9), state(1, 2)],
}
SHAPES: list[dict[str, int]] = [
    {"prefill": 1, "decode": 1},
    {"prefill": 1, "decode": 2},
    {"prefill": 2, "decode": 1},
    {"prefill": 2, "decode": 2},
    {"prefill": 1, "decode": 1, "mixed": 1},
    {"mixed": 2},
    {"mixed": 3},
]
EAGER = RoleRules(
    wait_seconds=1e-6,
    slowdown=1.0,
    gain=1.0,
    patience_seconds=0.0,
    rest_seconds=0.05,
    memory_seconds=0.05,
)
"""Roles change as often as may be."""
HEALED_SECONDS = 30.0
MOST_EVENTS = 60_000


def in_stages(spec: GroupSpec) -> GroupSpec:
    return replace(spec, layers=(0, 1, 2)) if spec.kind in BY_LAYER else spec


@dataclass(frozen=True)
class Steps:
    """A machine whose steps take a while, and longer with more tokens."""

    request_seconds: float = 0.0

    def step_seconds(self, plan: StepPlan) -> float:
        return 0.004 + 0.001 * plan.num_tokens


@dataclass(frozen=True)
class Fault:
    """Something that happens to a cluster; numbers are taken modulo what there is."""

    at_seconds: float
    what: str
    one: int
    other: int

    def happen(self, cluster: VirtualCluster) -> None:
        names, queue = cluster.names, cluster.front.queue
        name, another = names[self.one % len(names)], names[self.other % len(names)]
        open_now = [int(one.request_id) for entries in queue.entries()[:2] for one in entries]
        index = open_now[self.one % len(open_now)] if open_now else 0
        if self.what == "crash":
            cluster.crash(name, ("killed", "crash")[self.other % 2])
        elif self.what == "partition":
            cluster.network.partition([name], [another] if self.other % 2 else names)
        elif self.what == "heal":
            cluster.network.heal()
        elif self.what == "cancel":
            cluster.front.drop(index)
        elif self.what == "evacuate":
            cluster.front.evacuate(name)
        else:
            cluster.front.migrate(index, another)


@dataclass(frozen=True)
class Scenario:
    """A cluster, what it is asked and what happens to it.

    :param pulls: of which instance each request's first one asks for more of its prompt, by number;
        below 0 of none.  Repeated for further requests.
    """

    mix: str
    counts: dict[str, int]
    large: int
    seats: int
    batched: int
    pd_caching: Any
    routing: str
    loss: float
    duplication: float
    jitter_seconds: float
    page_seconds: float
    front_seconds: list[float]
    rows: list[TraceRow]
    faults: list[Fault] = field(default_factory=list)
    pulls: list[int] = field(default_factory=list)
    seed: int = 0
    changes_roles: bool = False
    notice_seconds: float = 0.0
    streams: bool = False

    def spec(self) -> ClusterSpec:
        layout = pool_of(self.large, *map(in_stages, MIXES[self.mix]))
        limits = Limits(
            max_num_batched_tokens=max(self.batched, self.seats),
            max_num_seqs=self.seats,
            max_model_len=max(2, longest_request(layout, 60, 4)),
            min_chunk_tokens=4,
        )
        bandwidth = math.inf if not self.page_seconds else 64 / self.page_seconds
        links = Links(
            Link(0.001, bandwidth, jitter_seconds=self.jitter_seconds),
            Link(
                0.001,
                loss=self.loss,
                duplication=self.duplication,
                jitter_seconds=self.jitter_seconds,
            ),
            hang_up_seconds=0.002,
            unreached_seconds=0.3,
            stop_seconds=0.3,
        )
        names = [f"{role}-{i}" for role, count in self.counts.items() for i in range(count)]
        delays = dict(zip(names, self.front_seconds * len(names), strict=False))
        return ClusterSpec(
            *(self.counts, layout, limits, Steps(), links, self.routing, self.pd_caching),
            front_seconds=delays,
            role_rules=EAGER if self.changes_roles else None,
            notice_seconds=self.notice_seconds,
            notice_loss=self.loss,
            restart_seconds=0.05,
            seed=self.seed,
            streams=ALWAYS if self.streams else None,
        )


def row(
    at: float,
    prompt: int,
    output: int,
    shared: int = 0,
    family: int = 0,
    session: str | None = None,
) -> TraceRow:
    """A request; ``shared`` tokens of its prompt are its family's."""
    ids = np.arange(family * 100, family * 100 + min(shared, prompt), dtype=np.int64)
    return TraceRow(at, prompt, output, ids, 1 if len(ids) else 0, session)


rows_drawn = st.lists(
    st.builds(
        row,
        st.floats(0, 0.2).map(lambda x: round(x, 3)),
        st.integers(1, 40),
        st.integers(1, 14),
        st.sampled_from([0, 3, 8, 9, 16, 30]),
        st.integers(0, 1),
        st.sampled_from([None, None, "s", "t"]),
    ),
    min_size=2,
    max_size=12,
)
WHATS = ("crash", "partition", "heal", "cancel", "cancel", "evacuate", "migrate", "migrate")
faults_drawn = st.lists(
    st.builds(
        Fault,
        st.floats(0, 0.5).map(lambda x: round(x, 3)),
        st.sampled_from(WHATS),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=10,
)
scenarios = st.builds(
    Scenario,
    st.sampled_from(list(MIXES)),
    st.sampled_from(SHAPES),
    st.sampled_from([6, 9, 12, 16, 24, 50]),
    st.integers(1, 4),
    st.sampled_from([3, 16]),
    st.sampled_from(PD_CACHINGS),
    st.sampled_from(ROUTINGS),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.0, 0.01, 0.1]),
    st.sampled_from([0.0, 0.01, 0.05, 0.2]),
    st.lists(st.sampled_from([0.0, 0.002, 0.03]), min_size=1, max_size=4),
    rows_drawn,
    faults_drawn,
    st.lists(st.sampled_from([-1, -1, 0, 1, 2]), max_size=4),
    st.integers(0, 999),
    st.booleans(),
    st.sampled_from([0.0, 0.0, 0.01, 0.5]),
    st.booleans(),
)


class Once(dict[int, Any]):
    def __setitem__(self, key: int, value: Any) -> None:
        assert key not in self, f"request {key} ended twice"
        super().__setitem__(key, value)


@dataclass
class Run:
    """A scenario from its beginning to when nothing happens any more, with all that must hold."""

    scenario: Scenario

    def __post_init__(self) -> None:
        scenario = self.scenario
        rows = sorted(scenario.rows, key=lambda one: one.arrival_s)
        self.texts = Texts(rows)
        self.spec = scenario.spec()
        self.cluster = VirtualCluster(
            self.spec,
            rows,
            prompts=self.texts.prompts,
            device=lambda core: WrittenPages(core.memory.layout, self.texts),
            records=True,
        )
        self.cluster.front.ends = Once()
        self.cluster.on_started = self.watch
        self.audits = 0

    def go(self) -> "Run":
        for fault in self.scenario.faults:
            self.cluster.loop.at(fault.at_seconds, partial(fault.happen, self.cluster))
        self.cluster.loop.at(HEALED_SECONDS, self.cluster.network.heal)
        self.cluster.start()
        for _ in range(MOST_EVENTS):
            if not self.cluster.go_on():
                self._check_end()
                return self
        raise AssertionError("it never ends")

    def watch(self, instance: VirtualInstance) -> None:
        def audited() -> None:
            assert instance.core.audit() == ()
            assert audit_holds(instance.agent.holds, instance.core.memory) == []
            self.audits += 1

        instance.watch = audited
        take, name = instance.take, instance.name

        def taken(entry: Input) -> None:
            take(self._pulling(entry, name) if isinstance(entry, Submit) else entry)

        instance.take = taken  # type: ignore[method-assign]

    def _pulling(self, command: Submit, name: str) -> Submit:
        pulls, names = self.scenario.pulls or [-1], self.cluster.names
        number = pulls[int(command.request_id) % len(pulls)]
        source = names[number % len(names)]
        return command if number < 0 or source == name else replace(command, pulls_from=source)

    def _check_end(self) -> None:
        front = self.cluster.front
        assert front.num_done == len(front.requests), "requests were lost"
        assert not front.queue.waiting and not front.queue.in_flight
        for index in front.ends:
            self._check_answer(index)
        for instance in self.cluster.instances.values():
            assert not any(instance.core.memory.snapshot().used), instance.name
            assert not len(instance.agent.holds) and not instance.rights
            assert not instance.core.has_work and not instance.core.pool.take_actions()
        for instance in [*self.cluster.past, *self.cluster.instances.values()]:
            self.check_journal(instance)

    def _check_answer(self, index: int) -> None:
        end, row_ = self.cluster.front.ends[index], self.texts.rows[index]
        output = list(self.cluster.front.outputs[index])
        right = self.texts.tokens(index)[row_.prompt_tokens :]
        assert output == right[: len(output)], f"request {index} has another answer"
        if end.reason == "length":
            assert len(output) == len(right)
        elif end.reason == "cancelled":
            assert any(one.what == "cancel" for one in self.scenario.faults)
        else:
            crashed = sum(one.what == "crash" for one in self.scenario.faults)
            assert end.reason == "error" and crashed >= 2, end
            assert "ended" in end.message

    def check_journal(self, instance: VirtualInstance) -> None:
        """The same inputs make the same plans and the same messages."""
        record = instance.record
        assert record is not None
        core, *_ = self.cluster.fresh_core(instance.name, instance.incarnation)
        actions: list[Action] = []

        def each(now: EngineCore) -> None:
            actions.extend(now.pool.take_actions())

        assert replay(record.journal.entries, core, each) == record.plans
        if instance.is_dead:  # what its last plan wanted done, it may not have come to
            del actions[len(record.actions) :]
        assert _plain(actions) == _plain(record.actions)


def _plain(actions: Sequence[Action]) -> list[Any]:
    return [(one.transfer, one.rows.tolist()) if isinstance(one, Pull) else one for one in actions]
