"""Which fronts are there and what they said, held against a record of all that happened."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvell.errors import ChangeSomething
from kvell.fleet.manager.messages import FrontBeat
from kvell.fleet.manager.steered import FrontTable
from tests.depth import machine

LEASE, LONELY = 10.0, 60.0
FRONTS = ("front-a", "front-b", "front-c")
INSTANCES = ("prefill-0", "decode-0", "decode-1")
fronts = st.sampled_from(FRONTS)
loads = st.dictionaries(st.sampled_from(INSTANCES), st.integers(0, 9_000))
roles = st.dictionaries(st.sampled_from(INSTANCES), st.sampled_from(("prefill", "decode")))


class Fronts(RuleBasedStateMachine):
    """Every sign of life and every leave is written down; questions read all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.table = FrontTable(LEASE, LONELY, self.now)
        self.signs: dict[str, list[float]] = {name: [] for name in FRONTS}
        self.leaves: dict[str, list[float]] = {name: [] for name in FRONTS}
        self.loads: dict[str, dict[str, int]] = {}
        self.roles: dict[str, str] = {}
        self.role_changes = 0
        self.ever: set[str] = set()
        self.asked = False

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 9.5, 10.0, 49.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(front=fronts)
    def comes(self, front: str) -> None:
        if not self.is_there(front):
            self.loads[front] = {}
        self.signs[front].append(self.now)
        self.ever.add(front)
        self.table.came(front, self.now)

    @rule(front=fronts, loads=loads, roles=roles, more=st.integers(-2, 3))
    def beats(self, front: str, loads: dict[str, int], roles: dict[str, str], more: int) -> None:
        changes = max(0, self.role_changes + more)
        is_newer = changes > self.role_changes
        if is_newer:
            self.roles, self.role_changes = roles, changes
        self.signs[front].append(self.now)
        self.loads[front] = loads
        self.ever.add(front)
        assert self.table.on_beat(front, FrontBeat(loads, roles, changes), self.now) == is_newer

    @precondition(lambda self: self.there())
    @rule(data=st.data(), asks=st.booleans())
    def leaves_on_purpose(self, data: st.DataObject, asks: bool) -> None:
        front = data.draw(st.sampled_from(self.there()))
        self.signs[front].clear()
        self.leaves[front].append(self.now)
        self.asked = asks or len(self.ever) < 2
        self.table.on_left(front, self.now, ends_cluster=asks)

    @rule(front=fronts)
    def says_nothing_sensible(self, front: str) -> None:
        with pytest.raises(ChangeSomething, match="below 0"):
            self.table.on_beat(front, FrontBeat({"decode-0": -1}, {}, 1_000), self.now)
        with pytest.raises(ChangeSomething, match="is not a role"):
            self.table.on_beat(front, FrontBeat({}, {"decode-0": "boss"}, 1_000), self.now)

    @rule(instance=st.sampled_from(INSTANCES), role=st.sampled_from(("prefill", "decode")))
    def manager_decides(self, instance: str, role: str) -> None:
        self.roles = {**self.roles, instance: role}
        self.role_changes += 1
        self.table.change_role(instance, role)

    @rule(instance=st.sampled_from(INSTANCES))
    def instance_goes(self, instance: str) -> None:
        self.roles = {name: role for name, role in self.roles.items() if name != instance}
        self.table.forget(instance)

    def is_there(self, front: str) -> bool:
        return bool(self.signs[front]) and self.now < self.signs[front][-1] + LEASE

    def there(self) -> list[str]:
        return [name for name in FRONTS if self.is_there(name)]

    @invariant()
    def says_who_is_there(self) -> None:
        assert sorted(self.table.living(self.now)) == self.there()

    @invariant()
    def sums_what_they_said(self) -> None:
        total: Counter[str] = Counter()
        for name in self.there():
            total.update(self.loads[name])
        assert self.table.loads(self.now) == dict(total)

    @invariant()
    def knows_the_newest_roles(self) -> None:
        assert (self.table.roles, self.table.role_changes) == (self.roles, self.role_changes)

    @invariant()
    def is_over_when_the_last_one_left_or_all_are_long_gone(self) -> None:
        ends = [at for all_of_one in self.leaves.values() for at in all_of_one]
        expiries = [all_of_one[-1] + LEASE for all_of_one in self.signs.values() if all_of_one]
        last_left = max(ends, default=0.0)
        last_gone = max([100.0, last_left, *expiries])
        on_purpose = bool(ends) and self.asked and last_left == last_gone
        is_over = not self.there() and (on_purpose or self.now >= last_gone + LONELY)
        assert self.table.is_over(self.now) == is_over


@pytest.mark.hypothesis
def test_fronts_come_and_go() -> None:
    run_state_machine_as_test(Fronts, settings=machine(60, 0.5))


def test_a_cluster_that_never_had_a_front_waits_for_one() -> None:
    table = FrontTable(LEASE, LONELY, 7.0)
    assert not table.is_over(7.0 + LONELY - 1)
    assert table.is_over(7.0 + LONELY)


def test_the_only_front_that_there_was_ends_the_cluster_at_once() -> None:
    table = FrontTable(LEASE, LONELY, 0.0)
    table.came("front-a", 1.0)
    table.came("front-a", 2.0)
    table.on_left("front-a", 2.0)
    assert table.is_over(2.0)


def test_the_last_of_several_is_waited_for_unless_it_asks_for_the_end() -> None:
    table = FrontTable(LEASE, LONELY, 0.0)
    table.came("front-a", 1.0)
    table.came("front-b", 1.0)
    table.on_left("front-a", 2.0, ends_cluster=True)
    assert not table.is_over(2.0), "another is there"
    table.on_left("front-b", 3.0)
    assert not table.is_over(3.0 + LONELY - 1) and table.is_over(3.0 + LONELY)
    table.came("front-c", 4.0)
    table.on_left("front-c", 5.0, ends_cluster=True)
    assert table.is_over(5.0)


def test_a_front_that_died_after_the_last_one_left_is_waited_for() -> None:
    table = FrontTable(LEASE, LONELY, 0.0)
    table.came("front-a", 0.0)
    table.came("front-b", 5.0)
    table.on_left("front-a", 6.0)
    assert not table.is_over(5.0 + LEASE), "its lease has just ended"
    assert not table.is_over(5.0 + LEASE + LONELY - 1)
    assert table.is_over(5.0 + LEASE + LONELY)


def test_a_front_whose_connection_was_cut_keeps_its_load_until_its_lease_ends() -> None:
    table = FrontTable(LEASE, LONELY, 0.0)
    table.on_beat("front-a", FrontBeat({"decode-0": 300}), 0.0)
    table.came("front-a", 8.0)
    assert table.loads(17.0) == {"decode-0": 300}
    assert table.loads(18.0) == {}
    table.came("front-a", 19.0)
    assert table.loads(19.0) == {}, "what it said before its lease ended does not count"


def test_a_manager_that_has_just_started_learns_the_roles() -> None:
    table = FrontTable(LEASE, LONELY, 0.0)
    old, new = {"decode-0": "prefill"}, {"decode-0": "prefill", "decode-1": "prefill"}
    assert table.on_beat("front-a", FrontBeat({}, new, 6), 0.0)
    assert not table.on_beat("front-b", FrontBeat({}, old, 5), 0.0)
    assert (table.roles, table.role_changes) == (new, 6)
    table.change_role("decode-1", "decode")
    assert (table.roles["decode-1"], table.role_changes) == ("decode", 7)
