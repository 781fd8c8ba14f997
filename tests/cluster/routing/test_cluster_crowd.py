"""Instances of one host slow each other, by how many of them compute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.routing.instance_pace import (
    MOST_COMPUTING,
    Crowd,
    CrowdTime,
    FirstToken,
    InstancePace,
)
from kvell.cluster.routing.pace import Pace, PromptWork
from kvell.cost.prices import ExecCosts

COSTS = ExecCosts(request_seconds=0.0, token_seconds=1e-3, pair_seconds=0.0)
SECOND = PromptWork(0.0, 1000, 0)
SLOWS = {1: 1.0, 2: 1.2, 3: 1.8}


def instances(count: int) -> list[InstancePace]:
    pace, crowd = Pace(COSTS), Crowd()
    return [InstancePace(pace, crowd) for _ in range(count)]


def serve(served: list[InstancePace], now: float) -> float:
    """Each instance gets a prompt of one second; return when all are done."""
    crowd = served[0].crowd
    predicted = []
    for each in served:
        each.begin_prompts(now)
        predicted.append(FirstToken(each.seconds(SECOND), SECOND, crowd.time(now)))
        each.set_computing(True)
    then = now + SLOWS[len(served)]
    for each, first in zip(served, predicted, strict=True):
        each.learn(first, then)
    crowd.pass_to(then)
    for each in served:
        each.set_computing(False)
    return then


def test_each_number_of_instances_has_its_slowdown() -> None:
    three = instances(3)
    now = 0.0
    for turn in range(90):
        now = serve(three[: turn % 3 + 1], now)
    for count, slows in SLOWS.items():
        for each in three[: count - 1]:
            each.set_computing(True)
        assert three[-1].seconds(SECOND) == pytest.approx(slows, rel=0.05)
        for each in three:
            each.set_computing(False)


def test_the_nearest_number_counts_before_any_prompt() -> None:
    (only, *others) = instances(4)
    now = 0.0
    for _ in range(30):
        now = serve([only, others[0]], now)
    for each in others:
        each.set_computing(True)
    assert only.crowd.slowdown(more=1) == only.crowd.slowdown(more=-1)


def test_what_is_done_counts_at_the_present_slowdown() -> None:
    first, other = instances(2)
    now = 0.0
    for _ in range(60):
        now = serve([first], serve([first, other], now))
    first.begin_prompts(now)
    first.set_computing(True)
    alone = first.done_seconds(now + 1.0)
    assert alone == pytest.approx(1.0)
    other.set_computing(True)
    assert first.done_seconds(now + 1.0) == pytest.approx(SLOWS[2], rel=0.05)


def test_a_prompt_that_waited_has_the_instance_from_the_end_of_the_one_before() -> None:
    (only,) = instances(1)
    only.begin_prompts(0.0)
    predicted = [FirstToken(9.0, SECOND, only.crowd.time(0.0)) for _ in range(2)]
    only.set_computing(True)
    for end, first in zip((1.0, 2.0), predicted, strict=True):
        only.learn(first, end)
        only.begin_prompts(end)
    assert only.seconds(SECOND) == pytest.approx(1.0)


@pytest.mark.parametrize("shows_no_pace", ["fetches", "shares a step"])
def test_prompts_that_show_no_pace_are_left_out(shows_no_pace: str) -> None:
    (only,) = instances(1)
    since = only.crowd.time(0.0)
    only.set_computing(True)
    if shows_no_pace == "fetches":
        only.learn(FirstToken(1.0, SECOND, since, fetches=True), 30.0)
    else:
        only.begin_prompts(5.0)
        only.learn(FirstToken(1.0, SECOND, since), 5.1)
    assert only.seconds(SECOND) == pytest.approx(1.0)


steps = st.lists(st.tuples(st.floats(0.0, 10.0), st.integers(0, 2 * MOST_COMPUTING)), max_size=30)


@given(steps, st.floats(1e-6, 1e6))
def test_time_is_split_without_loss(moves: list[tuple[float, int]], expected: float) -> None:
    crowd, now, computing = Crowd(), 0.0, 0
    times: list[CrowdTime] = [crowd.time(now)]
    for passed, number in moves:
        for _ in range(abs(number - computing)):
            (crowd.begin if number > computing else crowd.end)()
        computing = number
        now += passed
        times.append(crowd.time(now))
        assert crowd.alone_seconds(times[0], times[-1]) <= now + 1e-9
        assert sum(times[-1].totals) == pytest.approx(now)
        crowd.note(times[0], times[-1], expected)
        assert crowd.slowdown() >= 1.0
