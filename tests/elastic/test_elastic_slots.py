"""Slots: best fit, coalescing, reuse of what is mapped, fences; and they tile the range."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvell.elastic.slots import Placement, SlotSpace, SlotState
from tests.depth import machine

NOTHING = Placement(0, 0, ())


def mapped(space: SlotSpace, start: int, count: int) -> None:
    space.fill(range(start, start + count))


def used(space: SlotSpace, start: int, count: int, step: int = 1) -> None:
    mapped(space, start, count)
    space.take(start, count, step)


def states(space: SlotSpace) -> str:
    letters = {p: "-iUs"[state] for state in SlotState for p in space.positions(state)}
    return "".join(letters[p] for p in range(space.num_positions))


def test_a_first_slot_lacks_all_its_chunks_and_the_next_of_its_size_none() -> None:
    space = SlotSpace(8)
    first = space.find(3)
    assert first == Placement(0, 3, (0, 1, 2))
    used(space, 0, 3)
    space.release(0, 3, 1)
    assert space.find(3) == Placement(0, 3, ())
    assert space.find(4) == Placement(0, 4, (3,)), "it grows where it is mapped"


def test_the_smallest_idle_run_that_is_large_enough_is_taken() -> None:
    space = SlotSpace(12)
    used(space, 0, 4)
    used(space, 4, 1)
    used(space, 5, 3)
    space.release(0, 4, 1)
    space.release(5, 3, 1)
    assert space.find(2) == Placement(5, 2, ())
    assert space.find(4) == Placement(0, 4, ())
    assert space.find(5) == Placement(5, 5, (8, 9)), "three of five are mapped there"


def test_free_neighbours_are_one() -> None:
    space = SlotSpace(6)
    for start in (0, 2, 4):
        used(space, start, 2)
    for start, step in ((0, 5), (4, 7), (2, 6)):
        space.release(start, 2, step)
    (segment,) = space.segments
    assert (segment.start, segment.count, segment.state, segment.step) == (0, 6, 1, 7)
    assert space.find(6) == Placement(0, 6, ())


def test_a_window_that_lacks_least_is_found_inside_a_run() -> None:
    space = SlotSpace(10)
    mapped(space, 4, 3)
    assert space.find(4) == Placement(3, 4, (3,))
    assert space.find(11) is None


def test_what_was_idle_longest_goes_first_from_its_end() -> None:
    space = SlotSpace(6)
    for start, step in ((0, 9), (2, 3), (4, 5)):
        used(space, start, 1)
        space.release(start, 1, step)
    assert list(space.oldest_idle(NOTHING)) == [2, 4, 0]
    assert list(space.oldest_idle(Placement(2, 2, ()))) == [4, 0]


def test_stale_positions_wait_for_the_last_step_that_used_them() -> None:
    space = SlotSpace(4)
    used(space, 0, 2, step=3)
    space.release(0, 2, 3)
    space.retire([0, 1])
    assert states(space) == "ss--"
    assert space.find(3) is None, "their addresses are not free yet"
    assert space.due(2) == ()
    assert space.due(3) == (0, 1)
    space.clear([1])
    assert states(space) == "s---"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda s: s.take(0, 3, 1), "not IDLE"),
        (lambda s: s.release(0, 1, 1), "not USED"),
        (lambda s: s.fill([0]), "not BARE"),
        (lambda s: s.clear([0]), "not STALE"),
        (lambda s: s.take(3, 2, 1), "are not IDLE"),
        (lambda s: s.fill([4]), "no position 4"),
    ],
)
def test_wrong_changes_are_refused(change: object, problem: str) -> None:
    space = SlotSpace(4)
    mapped(space, 0, 2)
    before = space.segments
    assert callable(change)
    with pytest.raises(ValueError, match=problem):
        change(space)
    assert space.segments == before


class Slots(RuleBasedStateMachine):
    """Beside a list of states, one for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.space = SlotSpace(24)
        self.states = [SlotState.BARE] * 24
        self.slots: list[tuple[int, int]] = []
        self.step = 1

    def put(self, positions: list[int], state: SlotState) -> None:
        for position in positions:
            self.states[position] = state

    @rule(count=st.integers(1, 10))
    def take(self, count: int) -> None:
        self.step += 1
        place = self.space.find(count)
        free = "".join("x" if s in (0, 1) else "." for s in self.states)
        assert (place is None) == ("x" * count not in free)
        if place is None:
            return
        window = range(place.start, place.start + count)
        bare = [p for p in window if self.states[p] is SlotState.BARE]
        assert list(place.missing) == bare
        if "i" * count in "".join("-iUs"[s] for s in self.states):
            assert not bare, "an idle run was large enough"
        self.space.fill(place.missing)
        self.space.take(place.start, count, self.step)
        self.put(list(window), SlotState.USED)
        self.slots.append((place.start, count))

    @rule(index=st.integers(0, 9))
    def release(self, index: int) -> None:
        if self.slots:
            start, count = self.slots.pop(index % len(self.slots))
            self.space.release(start, count, self.step)
            self.put(list(range(start, start + count)), SlotState.IDLE)

    @rule(count=st.integers(0, 6))
    def retire(self, count: int) -> None:
        chosen = list(self.space.oldest_idle(NOTHING))[:count]
        assert all(self.states[p] is SlotState.IDLE for p in chosen)
        self.space.retire(chosen)
        self.put(chosen, SlotState.STALE)

    @rule(back=st.integers(0, 3))
    def clear(self, back: int) -> None:
        due = list(self.space.due(self.step - back))
        assert all(self.states[p] is SlotState.STALE for p in due)
        self.space.clear(due)
        self.put(due, SlotState.BARE)

    @invariant()
    def tiles(self) -> None:
        assert states(self.space) == "".join("-iUs"[s] for s in self.states)
        for state in SlotState:
            assert self.space.count(state) == self.states.count(state)
        at = 0
        for segment in self.space.segments:
            assert segment.start == at and segment.count > 0
            at = segment.end
        assert at == self.space.num_positions


Slots.TestCase.settings = machine(40, weight=0.5)
TestSlots = Slots.TestCase
