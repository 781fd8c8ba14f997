"""Roles follow the load, without swinging to and fro."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.roles import OTHER, Role, RoleChanger, RoleRules, RoleView

RULES = RoleRules()


class Cluster:
    """Instances whose role's work is shared evenly."""

    def __init__(self, prefill: int, decode: int) -> None:
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        self.roles: dict[str, Role] = {
            name: "prefill" if name.startswith("prefill") else "decode" for name in names
        }
        self.changer = RoleChanger(RULES)
        self.changes: list[tuple[float, str, Role]] = []

    def counts(self) -> dict[Role, int]:
        counted = Counter(self.roles.values())
        return {"prefill": counted["prefill"], "decode": counted["decode"]}

    def look(self, work: dict[Role, int], now_seconds: float) -> None:
        counts = self.counts()
        views = [
            RoleView(name, role, work[role] // counts[role]) for name, role in self.roles.items()
        ]
        change = self.changer.decide(views, now_seconds)
        if change is not None:
            name, role = change
            assert self.roles[name] == OTHER[role], "it has that role already"
            self.roles[name] = role
            self.changes.append((now_seconds, name, role))

    def run(self, work: dict[Role, int], seconds: int, start: float = 0.0) -> float:
        for second in range(seconds):
            self.look(work, start + second)
        return start + seconds


amounts = st.integers(0, 200_000)


@given(st.integers(1, 6), st.integers(1, 6), amounts, amounts)
def test_under_a_steady_load_roles_settle_where_the_busier_has_least(
    prefill: int, decode: int, prompts: int, answers: int
) -> None:
    cluster = Cluster(prefill, decode)
    work: dict[Role, int] = {"prefill": prompts, "decode": answers}
    now = cluster.run(work, 400)
    before = len(cluster.changes)
    cluster.run(work, 400, now)
    assert len(cluster.changes) == before, "it is still changing"
    roles = [role for _, _, role in cluster.changes]
    assert len(set(roles)) <= 1, "it went to and fro"
    counts = cluster.counts()
    assert min(counts.values()) >= 1

    def most(more: int) -> float:
        """Of the busier role's instances, if ``more`` changed to prefill."""
        return max(prompts / (counts["prefill"] + more), answers / (counts["decode"] - more))

    for more in (-1, 1):
        if 0 < counts["prefill"] + more < prefill + decode:
            worth = most(0) >= RULES.least_work and most(more) * RULES.gain * 1.05 < most(0)
            assert not worth, "a further change would help"


@given(st.lists(st.tuples(amounts, amounts), max_size=80), st.integers(2, 5))
def test_changes_are_rare_and_every_role_stays(loads: list[tuple[int, int]], count: int) -> None:
    cluster = Cluster(count, count)
    for second, (prompts, answers) in enumerate(loads):
        cluster.look({"prefill": prompts, "decode": answers}, float(second))
        assert min(cluster.counts().values()) >= 1
    times = [at for at, _, _ in cluster.changes]
    gaps = [b - a for a, b in pairwise(times)]
    assert all(gap >= RULES.rest_seconds for gap in gaps)


def test_a_swinging_load_takes_two_instances_along_each_way() -> None:
    cluster = Cluster(3, 3)
    now, loads = 0.0, [(100_000, 10_000), (10_000, 100_000)] * 4
    for prompts, answers in loads:
        before = len(cluster.changes)
        now = cluster.run({"prefill": prompts, "decode": answers}, 120, now)
        assert len(cluster.changes) - before <= 4
        wanted: Role = "prefill" if prompts > answers else "decode"
        assert cluster.counts()[wanted] == 5
    assert len(cluster.changes) == 2 + 4 * (len(loads) - 1)


@pytest.mark.parametrize("prompts", [0, 1_000])
def test_where_there_is_little_to_do_nothing_changes(prompts: int) -> None:
    cluster = Cluster(2, 4)
    cluster.run({"prefill": prompts, "decode": 0}, 200)
    assert not cluster.changes


def test_one_long_prompt_changes_nothing() -> None:
    cluster = Cluster(2, 4)
    now = cluster.run({"prefill": 0, "decode": 0}, 10)
    now = cluster.run({"prefill": 100_000, "decode": 0}, 3, now)
    cluster.run({"prefill": 0, "decode": 0}, 30, now)
    assert not cluster.changes


def test_the_idlest_of_the_idler_role_changes() -> None:
    changer = RoleChanger(RULES)
    views = [
        RoleView("prefill-0", "prefill", 50_000),
        RoleView("decode-0", "decode", 300),
        RoleView("decode-1", "decode", 200),
    ]
    told = [changer.decide(views, float(second)) for second in range(10)]
    assert [one for one in told if one] == [("decode-1", "prefill")]


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (3, 1), (0, 3)])
def test_the_last_of_a_role_stays(prefill: int, decode: int) -> None:
    cluster = Cluster(prefill, decode)
    changer = cluster.changer
    views = [
        RoleView(name, role, 90_000 if role == "prefill" else 0)
        for name, role in cluster.roles.items()
    ]
    assert all(changer.decide(views, float(second)) is None for second in range(60))
