"""The rule of a team's way: it changes for those who lose time, and changes back."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.models.fused.decoder import (
    ALONE_BELOW,
    MOST_RESTING_TOKENS,
    SHARED_ABOVE,
    WEIGHT,
    PassRecord,
    TeamRule,
    Way,
)

TOOK_NS = 1_000_000
LOST_NS = TOOK_NS // 2
"""What a thread loses to one busy program."""
SOON, LATER = 24, 48


def step(rule: TeamRule, lost_ns: Sequence[int]) -> Way:
    way = rule.way(1)
    rule.note(PassRecord(way, TOOK_NS, lost_ns))
    return way


def beside(rule: TeamRule, lost_ns: Sequence[int]) -> Way:
    for _ in range(SOON):
        step(rule, lost_ns)
    return rule.way(1)


LITTLE_NS = int(SHARED_ABOVE * TOOK_NS / 3)


@given(st.lists(st.lists(st.integers(0, LITTLE_NS), min_size=3, max_size=3)))
def test_a_team_that_loses_little_goes_as_if_alone(steps: list[list[int]]) -> None:
    rule = TeamRule(3)
    assert {step(rule, lost) for lost in steps} <= {Way(3)}


def test_one_step_that_lost_everything_changes_nothing() -> None:
    rule = TeamRule(2)
    for lost in ([0, TOOK_NS], *[[0, 0]] * 10) * 10:
        assert step(rule, lost) == Way(2)


@pytest.mark.parametrize(
    ("lost", "resting"),
    [
        ((0, LOST_NS, 0), 0b010),
        ((0, LOST_NS, LOST_NS), 0b110),
        ((LOST_NS, 0, 0), 0b100),
        ((LOST_NS, LOST_NS, 0), 0b010),
        ((LOST_NS, LOST_NS, LOST_NS), 0b110),
    ],
    ids=str,
)
def test_threads_that_lose_rest_but_never_the_caller_s(lost: tuple[int, ...], resting: int) -> None:
    way = beside(TeamRule(3), lost)
    assert (way.is_shared, way.resting) == (True, resting)


def test_long_steps_give_way_without_a_rest() -> None:
    rule = TeamRule(2)
    assert rule.way(MOST_RESTING_TOKENS + 1) == Way(2)
    assert beside(rule, [0, LOST_NS]) == rule.way(MOST_RESTING_TOKENS)
    long = rule.way(MOST_RESTING_TOKENS + 1)
    assert (long.is_shared, long.resting) == (True, 0)


def test_a_neighbour_that_moves_is_followed() -> None:
    rule = TeamRule(3)
    assert beside(rule, [0, LOST_NS, 0]).resting == 0b010
    for _ in range(2):
        step(rule, [0, 0, LOST_NS])
    assert rule.way(1).resting == 0b110, "the first may lose again"
    for _ in range(LATER):
        step(rule, [0, 0, LOST_NS])
    assert rule.way(1).resting == 0b100


@pytest.mark.parametrize("rule", [TeamRule(1), TeamRule(2, is_fixed=True)])
def test_one_thread_and_a_fixed_team_learn_nothing(rule: TeamRule) -> None:
    alone = rule.way(1)
    assert not alone.is_shared
    lost = [LOST_NS] * alone.threads
    assert {step(rule, lost) for _ in range(50)} == {alone}


@given(st.lists(st.integers(0, 3), max_size=50))
def test_a_neighbour_that_is_seen_now_and_then_is_still_there(calm: list[int]) -> None:
    rule = TeamRule(2)
    way = beside(rule, [LOST_NS, LOST_NS])
    for steps in calm:
        assert {step(rule, [0, 0]) for _ in range(steps)} <= {way}
        for _ in range(steps + 1):
            assert step(rule, [LOST_NS, LOST_NS]) == way


@given(st.integers(0, 200))
def test_behind_a_neighbour_that_left_the_team_is_alone_again(steps: int) -> None:
    rule = TeamRule(2)
    way = beside(rule, [0, LOST_NS])
    for _ in range(steps):
        step(rule, [0, LOST_NS])
    assert {step(rule, [0, 0]) for _ in range(LATER)} == {way, Way(2)}
    assert {step(rule, [0, 0]) for _ in range(50)} == {Way(2)}
    assert beside(rule, [0, LOST_NS]) == way, "and it learns again as at first"


def test_what_keeps_a_way_would_not_have_begun_it() -> None:
    part_ns = int((ALONE_BELOW + SHARED_ABOVE) / 2 * TOOK_NS)
    rule = TeamRule(2)
    assert {step(rule, [0, part_ns]) for _ in range(100)} == {Way(2)}
    way = beside(rule, [0, LOST_NS])
    assert way.is_shared
    assert {step(rule, [0, part_ns]) for _ in range(100)} == {way}


@given(st.lists(st.lists(st.integers(0, TOOK_NS), min_size=4, max_size=4), max_size=300))
def test_whatever_happens_a_way_is_one_of_the_team(steps: list[list[int]]) -> None:
    """A team that gives way has lost enough on average; one that does not has not lost too much."""
    rule, lost = TeamRule(4), 0.0
    for losses in steps:
        way = step(rule, losses)
        assert way.threads == 4
        assert way.resting in range(0, 16, 2)
        assert bool(way.resting) == way.is_shared
        assert lost > ALONE_BELOW - 1e-9 if way.is_shared else lost < SHARED_ABOVE + 1e-9
        lost += WEIGHT * (sum(losses) / TOOK_NS - lost)
