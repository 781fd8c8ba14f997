"""Roles follow the load, without swinging to and fro."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.steering.steering import OTHER, Role, RoleChanger, RoleRules
from kvell.cost.prices import FIT_BATCH, ExecCosts
from kvell.engine.protocol.statistics import InstanceReport
from tests.reports import facts

RULES = RoleRules()
COSTS = ExecCosts(
    request_seconds=0.008,
    token_seconds=0.000046,
    output_token_seconds=0.008 / FIT_BATCH + 0.00005,
    chunk_tokens=2_000,
)
"""A prompt token takes 50 µs, a step 8 ms, and each answer adds 50 µs to it."""
PRICED = InstanceReport(facts(prices=COSTS))
LATE_TOKENS = 10_000
"""Of prompts, for one instance."""
LATE_ANSWERS = 160


def lateness(role: Role, work: float, count: int) -> float:
    """As the rules say it: seconds over those that are allowed."""
    if role == "prefill":
        return work / count * 50e-6 / RULES.wait_seconds
    return (8e-3 + work / count * 50e-6) / 8e-3 / RULES.slowdown


@dataclass(eq=False)
class Worker(InstanceLoad):
    """An instance with a part of the work."""

    instance_id: str = ""
    role: str = ""
    work: int = 0
    report: InstanceReport = PRICED


class Cluster:
    """Instances whose role's work is shared evenly."""

    def __init__(self, prefill: int, decode: int, costs: ExecCosts = COSTS) -> None:
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        self.roles: dict[str, Role] = {
            name: "prefill" if name.startswith("prefill") else "decode" for name in names
        }
        self.changer = RoleChanger(RULES)
        self.report = InstanceReport(facts(prices=costs))
        self.changes: list[tuple[float, str, Role]] = []

    def counts(self) -> dict[Role, int]:
        counted = Counter(self.roles.values())
        return {"prefill": counted["prefill"], "decode": counted["decode"]}

    def look(self, work: dict[Role, int], now_seconds: float) -> None:
        """Shares are whole; the first instances of a role have what is left over."""
        left, counts, views = dict(work), self.counts(), []
        for name, role in self.roles.items():
            share = -(-left[role] // counts[role])
            left[role] -= share
            counts[role] -= 1
            views.append(Worker(name, role, share, self.report))
        for name, role in self.changer.decide(views, now_seconds):
            assert self.roles[name] == OTHER[role], "it has that role already"
            self.roles[name] = role
            self.changes.append((now_seconds, name, role))

    def run(self, work: dict[Role, int], seconds: int, start: float = 0.0) -> float:
        for second in range(seconds):
            self.look(work, start + second)
        return start + seconds

    def lateness(self, work: dict[Role, int], more: int = 0) -> float:
        """Of the later role, if ``more`` instances changed to prefill."""
        counts = self.counts()
        return max(
            lateness("prefill", work["prefill"], counts["prefill"] + more),
            lateness("decode", work["decode"], counts["decode"] - more),
        )


tokens = st.integers(0, 20 * LATE_TOKENS)
answers = st.integers(0, 20 * LATE_ANSWERS)


@given(st.integers(1, 6), st.integers(1, 6), tokens, answers)
def test_under_a_steady_load_roles_settle_where_neither_is_late_or_nothing_helps(
    prefill: int, decode: int, prompts: int, answered: int
) -> None:
    cluster = Cluster(prefill, decode)
    work: dict[Role, int] = {"prefill": prompts, "decode": answered}
    before = cluster.lateness(work)
    now = cluster.run(work, 200)
    changes = len(cluster.changes)
    cluster.run(work, 200, now)
    assert len(cluster.changes) == changes, "it is still changing"
    assert len({role for _, _, role in cluster.changes}) <= 1, "it went to and fro"
    assert len({at for at, _, _ in cluster.changes}) <= 1, "one decision is enough"
    counts = cluster.counts()
    assert min(counts.values()) >= 1
    after = cluster.lateness(work)
    if cluster.changes:
        assert before >= 1
        assert after <= RULES.spare + 1e-9 or after * RULES.gain <= before + 1e-9
    elif before > 1:
        for more in range(1 - counts["prefill"], counts["decode"]):
            assert cluster.lateness(work, more) > RULES.spare - 1e-9
            assert cluster.lateness(work, more) * RULES.gain > before - 1e-9


@given(st.lists(st.tuples(tokens, answers), max_size=80), st.integers(2, 5))
def test_decisions_are_rare_and_every_role_stays(loads: list[tuple[int, int]], count: int) -> None:
    cluster = Cluster(count, count)
    for second, (prompts, answered) in enumerate(loads):
        cluster.look({"prefill": prompts, "decode": answered}, float(second))
        assert min(cluster.counts().values()) >= 1
    times = sorted({at for at, _, _ in cluster.changes})
    assert all(after - before >= RULES.rest_seconds for before, after in pairwise(times))


def test_one_decision_moves_as_many_as_the_load_asks_for() -> None:
    cluster = Cluster(2, 8)
    cluster.run({"prefill": int(4.4 * LATE_TOKENS), "decode": 2 * LATE_ANSWERS // 2}, 10)
    assert cluster.counts() == {"prefill": 5, "decode": 5}, "with four it is at 1.1, with five 0.88"
    assert len({at for at, _, _ in cluster.changes}) == 1


def test_who_gives_must_not_be_late_afterwards() -> None:
    cluster = Cluster(2, 4)
    work: dict[Role, int] = {"prefill": int(2.2 * LATE_TOKENS), "decode": int(3.9 * LATE_ANSWERS)}
    cluster.run(work, 30)
    assert not cluster.changes, "answers would be as late as prompts are now"


def test_a_swinging_load_takes_the_same_instances_along_each_way() -> None:
    cluster = Cluster(3, 3)
    loads: list[dict[Role, int]] = [
        {"prefill": int(3.4 * LATE_TOKENS), "decode": 10},
        {"prefill": 500, "decode": int(2.3 * LATE_ANSWERS)},
    ] * 4
    now, each = 0.0, []
    for work in loads:
        before = len(cluster.changes)
        now = cluster.run(work, 60, now)
        each.append(len(cluster.changes) - before)
        assert cluster.lateness(work) <= 1
    assert each == [1, 1] * 4


@pytest.mark.parametrize("prompts", [0, LATE_TOKENS, 2 * LATE_TOKENS - 1])
def test_where_nobody_is_late_nothing_changes(prompts: int) -> None:
    cluster = Cluster(2, 4)
    cluster.run({"prefill": prompts, "decode": 0}, 100)
    assert not cluster.changes


def test_a_burst_that_is_over_at_once_changes_nothing() -> None:
    cluster = Cluster(2, 4)
    now = cluster.run({"prefill": 0, "decode": 0}, 10)
    cluster.look({"prefill": 10 * LATE_TOKENS, "decode": 0}, now)
    cluster.look({"prefill": 10 * LATE_TOKENS, "decode": 0}, now + RULES.patience_seconds / 2)
    cluster.run({"prefill": 0, "decode": 0}, 30, now + RULES.patience_seconds)
    assert not cluster.changes


def test_work_that_gets_less_by_itself_needs_nobody() -> None:
    cluster = Cluster(2, 4)
    for second in range(30):
        left = int(40 * LATE_TOKENS * 0.9**second)
        cluster.look({"prefill": left, "decode": 0}, float(second))
        if second == 0:
            assert lateness("prefill", left, 2) > 10
    assert not cluster.changes


def test_a_role_that_was_busy_just_now_gives_nobody() -> None:
    """One look at which its work is away says little."""
    cluster = Cluster(1, 2)
    now = cluster.run({"prefill": 0, "decode": int(1.8 * LATE_ANSWERS)}, 20)
    now = cluster.run({"prefill": int(1.1 * LATE_TOKENS), "decode": 0}, 3, now)
    assert not cluster.changes
    cluster.run({"prefill": int(1.1 * LATE_TOKENS), "decode": 0}, 8, now)
    assert cluster.counts() == {"prefill": 2, "decode": 1}


@pytest.mark.parametrize(("factor", "changes"), [(1.0, 1), (0.1, 0)])
def test_the_same_work_is_late_where_it_takes_longer(factor: float, changes: int) -> None:
    quicker = structs.replace(
        COSTS,
        request_seconds=COSTS.request_seconds * factor,
        token_seconds=COSTS.token_seconds * factor,
    )
    cluster = Cluster(1, 2, quicker)
    cluster.run({"prefill": int(1.5 * LATE_TOKENS), "decode": 0}, 20)
    assert len(cluster.changes) == changes


def test_answers_that_cost_nothing_are_never_late() -> None:
    free = structs.replace(COSTS, output_token_seconds=COSTS.request_seconds / FIT_BATCH / 2)
    cluster = Cluster(3, 1, free)
    cluster.run({"prefill": 0, "decode": 1_000_000}, 20)
    assert not cluster.changes


def test_the_idlest_of_the_idler_role_changes() -> None:
    changer = RoleChanger(RULES)
    views = [
        Worker("prefill-0", "prefill", int(1.5 * LATE_TOKENS)),
        Worker("decode-0", "decode", 3),
        Worker("decode-1", "decode", 2),
    ]
    told = [changer.decide(views, float(second)) for second in range(10)]
    assert [one for one in told if one] == [[("decode-1", "prefill")]]


@pytest.mark.parametrize(("factor", "count"), [(1.0, 1), (0.5, 1), (2.0, 2)])
def test_an_instance_counts_by_its_own_prices(factor: float, count: int) -> None:
    """Those that could help compute prompts slower or quicker than the one that is late."""
    costs = structs.replace(
        COSTS,
        request_seconds=COSTS.request_seconds * factor,
        token_seconds=COSTS.token_seconds * factor,
        output_token_seconds=COSTS.output_token_seconds * factor,
    )
    others = InstanceReport(facts(prices=costs))
    views = [
        Worker("prefill-0", "prefill", int(1.3 * LATE_TOKENS)),
        *(Worker(f"decode-{number}", "decode", 0, others) for number in range(4)),
    ]
    changer = RoleChanger(RULES)
    changes = [change for second in range(4) for change in changer.decide(views, float(second))]
    assert [name for name, _ in changes] == [f"decode-{number}" for number in range(count)]


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (3, 1), (0, 3)])
def test_the_last_of_a_role_stays(prefill: int, decode: int) -> None:
    cluster = Cluster(prefill, decode)
    views = [
        Worker(name, role, 9 * LATE_TOKENS if role == "prefill" else 0)
        for name, role in cluster.roles.items()
    ]
    assert all(cluster.changer.decide(views, float(second)) == [] for second in range(60))
