"""Which instance continues a request: pages that need no transfer against longer steps."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvell.cluster.routing.costs import RequestView
from kvell.cluster.routing.policies import EarliestEnd, end_seconds
from kvell.cost.prices import BATCHES, ExecCosts
from kvell.engine.protocol.statistics import InstanceReport
from tests.reports import Routable, facts

COSTS = ExecCosts(fetch_token_seconds=1e-3, held_token_seconds=1e-6)
"""A token's transfer costs as much as a thousand held tokens in a step."""
REPORT = InstanceReport(facts(prices=COSTS))
LEFT, RIGHT = (Routable(name, report=REPORT) for name in ("decode-0", "decode-1"))


def request(output_tokens: int = 10, **hits: int) -> RequestView:
    return RequestView(
        1000, output_tokens, "", {name.replace("_", "-"): at for name, at in hits.items()}
    )


def chosen(view: RequestView, *instances: Routable) -> str:
    return EarliestEnd().choose(view, instances)


def test_of_instances_alike_the_one_that_has_the_text_continues_it() -> None:
    assert chosen(request(decode_1=900), LEFT, RIGHT) == "decode-1"
    assert chosen(request(decode_0=300, decode_1=900), LEFT, RIGHT) == "decode-1"


def test_a_text_draws_no_request_to_where_its_answer_takes_longer_than_the_transfer() -> None:
    """900 tokens are pulled in 0.9 s; 100,000 held tokens cost 0.1 s a step."""
    busy = replace(RIGHT, held_tokens=100_000)
    assert chosen(request(5, decode_1=900), LEFT, busy) == "decode-1"
    assert chosen(request(50, decode_1=900), LEFT, busy) == "decode-0"


def test_requests_on_their_way_count_like_those_that_are_there() -> None:
    """A burst of prompts has not arrived anywhere yet when the next one is routed."""
    there, coming = replace(LEFT, held_tokens=5000, running_requests=4), LEFT
    assert chosen(request(), there, RIGHT) == "decode-1"
    coming = replace(LEFT, coming_tokens=5000, num_coming=4)
    assert chosen(request(), coming, RIGHT) == "decode-1"
    assert end_seconds(there, request()) == end_seconds(coming, request())


def test_equal_instances_take_turns() -> None:
    policy = EarliestEnd()
    assert [policy.choose(request(), (LEFT, RIGHT)) for _ in range(4)] == [
        "decode-0",
        "decode-1",
    ] * 2


def test_each_instance_is_priced_by_its_own_calibration() -> None:
    slow = structs.replace(COSTS, output_token_seconds=1.0)
    other = replace(RIGHT, report=InstanceReport(facts(prices=slow)))
    assert chosen(request(decode_1=900), LEFT, other) == "decode-0"


@given(st.integers(1, 2000), st.integers(0, 10_000))
def test_a_step_is_priced_between_the_batches_that_are_measured(batch: int, held: int) -> None:
    seconds = COSTS.step_seconds(batch, held)
    assert seconds == pytest.approx(COSTS.step_seconds(batch, 0) + held * 1e-6)
    if batch in BATCHES:
        assert COSTS.step_seconds(batch, 0) == pytest.approx(COSTS.batch_seconds(batch))
    assert COSTS.step_seconds(batch + 1, held) >= seconds
