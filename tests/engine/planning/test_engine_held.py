"""Requests that are held have no part in steps, keep their pages, and block no others."""

import pytest

from kvell.engine.requests.plan import StepPlan
from kvell.vocabulary import RequestId
from tests.engine.traffic import Traffic, limits, works
from tests.pages.pools import group, pool_of

PROMPT = [1, 2, 3, 4, 5]


def step(traffic: Traffic, *held: str) -> StepPlan:
    plan = traffic.core.plan(frozenset(map(RequestId, held)))
    traffic.finish_step(plan)
    return plan


@pytest.fixture
def traffic() -> Traffic:
    return Traffic(pool_of(12, group(4, 1, 0)), limits())


def test_a_running_request_sits_out_and_goes_on(traffic: Traffic) -> None:
    traffic.submit("a", PROMPT)
    traffic.submit("b", [9, *PROMPT])
    traffic.step()
    assert works(step(traffic, "a")) == [("b", 6, 1)]
    assert works(step(traffic, "b")) == [("a", 5, 1)]
    traffic.run()
    assert len(traffic.tokens("a")) == len(traffic.tokens("b")) == 8


def test_a_waiting_request_is_passed_over(traffic: Traffic) -> None:
    held = [f"h{i}" for i in range(20)]  # more than may wait for a prefix
    for index, name in enumerate(held):
        traffic.submit(name, [index, 7, 8])
    traffic.submit("b", PROMPT)
    plan = step(traffic, *held)
    assert plan.admitted == ("b",)
    traffic.core.resume_held()
    traffic.run()


def test_a_core_whose_requests_are_held_rests_until_they_resume(traffic: Traffic) -> None:
    traffic.submit("a", PROMPT)
    traffic.step()
    assert step(traffic, "a").work == ()
    assert (traffic.core.has_work, traffic.core.has_requests) == (False, True)
    traffic.core.resume_held()
    traffic.run()
    assert len(traffic.tokens("a")) == 8
