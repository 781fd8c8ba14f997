"""Managers and whoever obeys them, in every order of what they hear."""

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvell.cluster.steering.epochs import HighestEpoch, Leadership, epoch_of
from tests.depth import machine


@given(
    st.lists(st.integers(0, 1 << 32)),
    st.integers(0, 1 << 32),
)
def test_who_obeys_never_takes_an_order_of_a_lower_epoch(seen: list[int], order: int) -> None:
    one = HighestEpoch()
    for epoch in seen:
        one.outranking(epoch, "a")
    highest = max(seen, default=0)
    assert one.epoch == highest
    told = one.outranking(order, "a")
    assert (told == 0) if order >= highest else (told == highest)
    if highest and order <= highest:
        assert one.outranking(highest, "b") > highest, "the first of an epoch has it"


@given(st.integers(0, 1 << 31), st.integers(0, 1 << 31), st.lists(st.integers(0, 1 << 31)))
def test_a_manager_that_starts_is_newer_than_all_that_it_finds(
    floor: int, started: int, told: list[int]
) -> None:
    before = Leadership(started)
    before.settle()
    ran = [before.next_incarnation() for _ in range(3)]
    assert ran == sorted(set(ran)) and set(map(epoch_of, ran)) == {before.epoch}
    one = Leadership(floor)
    one.on_incarnations(ran)
    for epoch in told:
        assert one.on_epoch(epoch) in ("leads", "rose")
    assert one.epoch > before.epoch
    assert one.epoch >= max(told, default=0)
    one.settle()
    assert one.on_epoch(one.epoch) == "leads" and one.on_epoch(one.epoch + 1) == "outranked"
    assert one.on_epoch(0) == "outranked", "it does not come back"


def test_incarnations_of_one_epoch_differ_when_their_numbers_begin_again() -> None:
    one = Leadership(7)
    drawn = [one.next_incarnation() for _ in range((1 << 16) + 2)]
    assert all(a != b for a, b in pairwise(drawn))
    assert set(map(epoch_of, drawn)) == {7}


@dataclass
class _Instance:
    seen: HighestEpoch = field(default_factory=HighestEpoch)
    obeyed: list[tuple[int, int]] = field(default_factory=list)


class ManagersOfOneCluster(RuleBasedStateMachine):
    """Managers begin, are stopped in any state, and go on; instances hear whoever speaks."""

    @initialize(instances=st.integers(1, 3))
    def begin(self, instances: int) -> None:
        self.instances = [_Instance() for _ in range(instances)]
        self.managers: list[Leadership] = []
        self.settled: list[Leadership] = []
        self.ran = [0]

    @rule(floor=st.integers(1, 3))
    def starts(self, floor: int) -> None:
        """Its clock may be behind: 1 to 3 is the order of nothing."""
        one = Leadership(floor)
        one.on_incarnations(self.ran)
        self.managers.append(one)

    @rule(data=st.data())
    def orders(self, data: st.DataObject) -> None:
        """A manager speaks to an instance, which answers what it has seen."""
        if not self.managers:
            return
        one = data.draw(st.sampled_from(self.managers))
        if one.is_outranked:
            return
        instance = data.draw(st.sampled_from(self.instances))
        told = instance.seen.outranking(one.epoch, str(id(one)))
        if told:
            assert one.on_epoch(told) != "leads"
        else:
            instance.obeyed.append((one.epoch, id(one)))
            self.ran.append(one.next_incarnation())

    @rule(data=st.data())
    def has_started(self, data: st.DataObject) -> None:
        if not self.managers:
            return
        one = data.draw(st.sampled_from(self.managers))
        while not one.is_outranked and any(self._refused(one)):
            pass
        if not one.is_outranked:
            one.settle()
            self.settled.append(one)

    def _refused(self, one: Leadership) -> list[bool]:
        """Speak to all; where one refused it, the manager has heard why."""
        refused = []
        for instance in self.instances:
            told = instance.seen.outranking(one.epoch, str(id(one)))
            refused.append(bool(told) and one.on_epoch(told) != "leads")
        return refused

    @invariant()
    def nobody_obeys_an_older_manager(self) -> None:
        for instance in getattr(self, "instances", []):
            epochs = [epoch for epoch, _ in instance.obeyed]
            assert epochs == sorted(epochs)
            assert len(set(instance.obeyed)) == len(set(epochs)), "an epoch is of one manager"

    def teardown(self) -> None:
        """At rest exactly one is left, of those that have started: the newest."""
        managers = getattr(self, "managers", [])
        for _ in range(len(managers) + 1):
            for one in managers:
                if not one.is_outranked:
                    self._refused(one)
        leads = [one for one in managers if one in self.settled and not one.is_outranked]
        assert len(leads) <= 1
        assert not managers or any(not one.is_outranked for one in managers)


ManagersOfOneCluster.TestCase.settings = machine(30)
TestManagersOfOneCluster = ManagersOfOneCluster.TestCase
