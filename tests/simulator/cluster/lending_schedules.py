"""Whole clusters that lend memory under drawn schedules: orders of several planners, and faults."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from kvell.cluster.instance_load import Movable
from kvell.cluster.routing.policies import ROUTINGS
from kvell.cluster.steering.steering import Steering
from kvell.engine.moving.handovers import Handovers
from kvell.engine.protocol.messages import MoveKvCache
from kvell.engine.requests.plan import StepResult
from kvell.memory import longest_request
from kvell.mempool.loans.messages import (
    Borrow,
    Fill,
    Filled,
    GiveBack,
    LoanOver,
    Recall,
)
from kvell.mempool.rendezvous import PD_CACHINGS
from kvell.mempool.transfers.actions import Send
from kvell.simulator.cluster.cluster import ClusterSpec, VirtualCluster
from kvell.simulator.cluster.instance import VirtualInstance
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import RequestId
from tests.engine.lending.borrow_audit import audit_borrowed
from tests.mempool.agent_audit import audit_loans
from tests.reports import Party, party_of
from tests.simulator.cluster.schedules import MIXES, SHAPES, WHATS, Fault, Run, Scenario, row

SECTION_TOKENS = 8
"""Tokens that are lent at once; real sections have 512."""
LONGEST_TOKENS = 120
"""Of a request, where the pool has room for it."""
PAUSES = (0.02, 0.3, 2.5, 6.0, 6.0)
"""Seconds; a creditor takes what it needs after two."""


@dataclass(frozen=True)
class Order(Fault):
    """What a planner with an old view orders, or a process that stands still; or another fault."""

    def happen(self, cluster: VirtualCluster) -> None:
        name = cluster.names[self.one % len(cluster.names)]
        if self.what == "pause":
            cluster.pause(name, PAUSES[self.other % len(PAUSES)])
        elif self.what == "lend":
            open_now = [one for entries in cluster.front.queue.entries()[:2] for one in entries]
            entry = open_now[self.one % len(open_now)] if open_now else None
            others = [one for one in cluster.names if entry is not None and one != entry.line]
            if entry is not None:
                target = others[self.other % len(others)]
                order(cluster, entry.request_id, target, 1 + self.other % 4)
        elif self.what == "stale":  # to whoever is named, of whatever attempt
            target = (*cluster.names, "nobody")[self.other % (len(cluster.names) + 1)]
            request = RequestId(str(self.one % len(cluster.front.requests)))
            send(cluster, name, MoveKvCache(request, self.other % 2, 1 + self.one % 3, target))
        else:
            super().happen(cluster)


def send(cluster: VirtualCluster, name: str, command: Any) -> None:
    cluster._tell(name, command)


def order(cluster: VirtualCluster, request: str, target: str, num_blocks: int) -> None:
    for name, command in cluster.front.queue.move(request, target, num_blocks):
        send(cluster, name, command)


@dataclass(frozen=True)
class LendingScenario(Scenario):
    """A scenario of instances that lend.

    :param apart: whether the last instance is on a host of its own.
    :param asks: whether all are, and ask each other for attention over what they lend.
    :param planners: seconds between two looks of each, and from a look until its orders are given.
    """

    apart: bool = False
    asks: bool = False
    planners: list[tuple[float, float]] = field(default_factory=list)

    def spec(self) -> ClusterSpec:
        made = super().spec()
        last = list(made.counts)[-1]
        hosts = {f"{last}-{made.counts[last] - 1}": "another"} if self.apart else {}
        if self.asks:
            names = [f"{role}-{i}" for role, count in made.counts.items() for i in range(count)]
            hosts = {name: name for name in names}
        longest = max(2, longest_request(made.layout, LONGEST_TOKENS, 4))
        limits = replace(made.limits, max_model_len=longest, section_tokens=SECTION_TOKENS)
        return replace(made, limits=limits, hosts=hosts, asks=self.asks)


class LendingRun(Run):
    """A scenario in which planners look and order until all requests have ended."""

    scenario: LendingScenario

    def go(self) -> "LendingRun":
        for every, late in self.scenario.planners:
            steering = Steering()
            self.cluster.loop.at(every, partial(self._look, steering, every, late))
        super().go()
        return self

    def _look(self, steering: Steering, every: float, late: float) -> None:
        front = self.cluster.front
        if front.num_done == len(front.requests):
            return
        lines = [one for one in front.queue.lines.values() if one.is_open]
        views = [party_of(one) for one in lines]
        movable = {one.instance_id: one.movable() for one in lines}
        self.cluster.loop.after(late, partial(self._order, steering, views, movable))
        self.cluster.loop.after(every, partial(self._look, steering, every, late))

    def _order(
        self, steering: Steering, views: list[Party], movable: dict[str, list[Movable]]
    ) -> None:
        now_seconds = self.cluster.loop.now_seconds
        for move in steering.decide(views, movable.__getitem__, now_seconds).moves:
            if move.num_blocks:
                order(self.cluster, move.request_id, move.target, move.num_blocks)

    def watch(self, instance: VirtualInstance) -> None:
        super().watch(instance)
        watch = instance.watch

        def audited() -> None:
            watch()
            assert audit_loans(instance.agent) == []
            assert isinstance(instance.core.pool, Handovers)
            assert audit_borrowed(instance.core.pool.borrowed) == []
            for rights in instance.agent.borrowing.readable.values():
                self._check_right(rights.peer, rights.incarnation, rights.right)

        instance.watch = audited

    def _check_right(self, creditor: str, incarnation: int, right: int) -> None:
        """A right that stands is one of a loan whose pages are held."""
        at = self.cluster.instances.get(creditor)
        if at is not None and at.incarnation == incarnation and right in at.rights:
            assert at.agent.lending.lends

    def _check_end(self) -> None:
        super()._check_end()
        for instance in self.cluster.instances.values():
            loans = instance.agent
            assert not len(loans.borrowing) and not len(loans.lending), instance.name
            assert isinstance(instance.core.pool, Handovers)
            assert not len(instance.core.pool.borrowed)
            assert len(instance.behind) == len(instance.agent.neighbours) < len(self.cluster.names)

    def seen(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for instance in [*self.cluster.past, *self.cluster.instances.values()]:
            record = instance.record
            assert record is not None
            sent = [one.message for one in record.actions if isinstance(one, Send)]
            for kind in (Borrow, Fill, Filled, GiveBack, LoanOver):
                found[kind.__name__] += len({m.loan for m in sent if isinstance(m, kind)})
            recalls = [one for one in sent if isinstance(one, Recall)]
            found["recalled"] += len({one.loan for one in recalls if one.ticks_left > 0})
            found["revoked"] += len({one.loan for one in recalls if one.ticks_left <= 0})
            results = [one for one in record.journal.entries if isinstance(one, StepResult)]
            found["missed"] += sum(len(one.missed) for one in results)
            assert isinstance(instance.core.pool, Handovers)
            found.update(instance.core.pool.borrowed.tally())
            found["read"] += sum(len(plan.borrowed) for plan in record.plans)
        return found


def drawn(seed: int) -> LendingScenario:
    """A scenario for a number: long answers, of which parts are lent, and then too many prompts."""
    chance = Random(seed)
    pick = chance.choice
    large = pick([10, 12, 14, 16, 20, 26])
    early = [row_between(chance, 0.0, 0.1, large, 3) for _ in range(chance.randint(1, 3))]
    late = [row_between(chance, 0.15, 0.45, large, 1) for _ in range(chance.randint(3, 10))]
    counts = pick(SHAPES)
    faults: list[Fault] = [
        order_drawn(chance, "lend", 0.08, 0.35) for _ in range(chance.randint(2, 8))
    ]
    num_faults = pick([0, 1, 2, 4])
    faults += [order_drawn(chance, pick(HAPPENINGS), 0.15, 0.8) for _ in range(num_faults)]
    return LendingScenario(
        mix=pick(list(MIXES)),
        counts=counts,
        large=large,
        seats=chance.randint(2, 5),
        batched=pick([8, 16]),
        pd_caching=pick(PD_CACHINGS),
        routing=pick(ROUTINGS),
        loss=pick([0.0, 0.0, 0.1, 0.3]),
        duplication=pick([0.0, 0.2]),
        jitter_seconds=pick([0.0, 0.0, 0.01, 0.1]),
        page_seconds=pick([0.0, 0.0, 0.01, 0.05]),
        front_seconds=[pick([0.0, 0.002, 0.03]) for _ in range(4)],
        rows=[*early, *late],
        faults=faults,
        pulls=[pick([-1, -1, -1, 0, 1]) for _ in range(2)],
        seed=seed,
        changes_roles=pick([False, False, True]),
        streams=pick([False, True]),
        apart=pick([False, False, False, True]),
        planners=[(pick([0.02, 0.1]), pick([0.0, 0.05, 0.6])) for _ in range(chance.randint(0, 2))],
    )


def pressed(seed: int) -> LendingScenario:
    """A scenario for a number: one long answer is lent in parts, and then its creditors need all
    of their memory, while debtor or creditor often stand still."""
    chance = Random(seed)
    large = chance.choice([18, 20, 24])
    long = row(round(chance.uniform(0.0, 0.05), 3), chance.randint(50, 70), chance.randint(40, 50))
    late = [
        row(round(chance.uniform(*when), 3), chance.randint(30, 80), chance.randint(8, 30))
        # The later ones write where a creditor took its memory back from who stands still.
        for when, count in (((0.2, 0.4), chance.randint(4, 7)), ((2.3, 2.8), chance.randint(0, 6)))
        for _ in range(count)
    ]
    faults: list[Fault] = [
        Order(round(chance.uniform(0.08, 0.2), 3), "lend", 0, chance.randint(0, 9))
        for _ in range(chance.randint(2, 5))
    ]
    if chance.random() < 0.5:  # the debtor, in the middle of a step, for a while or for long
        faults.append(Order(round(chance.uniform(0.18, 0.3), 3), "pause", 0, chance.choice([1, 3])))
    for _ in range(chance.choice([0, 0, 1, 1, 2])):
        what = chance.choice(["pause", "pause", "pause", "crash", "partition", "heal", "cancel"])
        # Numbers below 2 are those of the instance that has the long answer, and of its first
        # creditor.
        one, other = chance.randint(0, 1), chance.randint(0, 9)
        faults.append(Order(round(chance.uniform(0.2, 0.6), 3), what, one, other))
    return replace(
        drawn(seed),
        counts=chance.choice([{"mixed": 2}, {"mixed": 2}, {"mixed": 3}]),
        large=large,
        seats=4,
        routing="round-robin",
        rows=[long, *late],
        faults=faults,
        pulls=[],
        changes_roles=False,
    )


HAPPENINGS = (*["pause"] * 6, *["stale"] * 3, *["lend"] * 2, *WHATS)


def row_between(chance: Random, first: float, last: float, large: int, answers: int) -> TraceRow:
    """A request that comes between two moments, in seconds, and that a pool of ``large`` serves.

    :param answers: fifths of the text that its answer has at least.
    """
    tokens = chance.randint(2 * large, min(110, 6 * large))
    output = chance.randint(tokens * answers // 5, tokens * 4 // 5)
    shared, family = chance.choice([0, 0, 0, 8, 16, 30]), chance.randint(0, 1)
    session, at = chance.choice([None, None, None, "s"]), round(chance.uniform(first, last), 3)
    return row(at, tokens - output, output, shared, family, session)


def order_drawn(chance: Random, what: str, first: float, last: float) -> Order:
    at_seconds = round(chance.uniform(first, last), 3)
    return Order(at_seconds, what, chance.randint(0, 9), chance.randint(0, 9))
