"""By layer or by request: which of two timelines is shorter."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvell.mempool.transfers.methods import (
    ALWAYS,
    COPIED,
    SENT,
    LayerPull,
    StreamCosts,
    pays_by_layer,
    seconds_by_layer,
    seconds_by_request,
)
from kvell.mempool.transfers.numbers import SLOTS, RightNumbers

COSTS = StreamCosts(
    bytes_per_second=100.0, piece_seconds=0.01, stage_seconds=0.1, token_seconds=0.5, slows=0.0
)
WHAT = LayerPull(size_bytes=800, pages=5, stages=4, tokens=80)

costs_drawn = st.builds(
    StreamCosts,
    st.floats(1e6, 1e10),
    st.floats(0, 1e-3),
    st.floats(0, 1e-2),
    st.floats(1e-6, 1e-2),
    st.floats(0, 1),
)
whats = st.builds(
    LayerPull,
    st.integers(1, 1 << 32),
    st.integers(1, 5000),
    st.integers(1, 8),
    st.integers(1, 4096),
)


def test_a_long_pass_hides_all_but_the_last_stage() -> None:
    assert math.isclose(seconds_by_request(WHAT, COSTS), 0.1 + 8.0 + 0.05)
    assert math.isclose(seconds_by_layer(WHAT, COSTS), 0.1 + 2.0 + 0.05)
    assert pays_by_layer(WHAT, COSTS)


def test_a_short_pass_hides_what_it_has_time_for() -> None:
    """Four stages of 2.15 s; the pass writes one each second."""
    short = replace(WHAT, tokens=8)
    assert math.isclose(seconds_by_layer(short, COSTS), 4 * 2.15 - 3 * 1.0)
    assert pays_by_layer(short, COSTS)


def test_many_small_pages_cost_more_by_layer_than_is_hidden() -> None:
    small = replace(WHAT, pages=500, tokens=8)
    assert seconds_by_layer(small, COSTS) > seconds_by_request(small, COSTS)
    assert not pays_by_layer(small, COSTS)


def test_what_comes_quickly_anyway_is_not_worth_the_messages() -> None:
    little = replace(WHAT, size_bytes=20, pages=1)
    assert seconds_by_layer(little, COSTS) < seconds_by_request(little, COSTS)
    assert not pays_by_layer(little, COSTS)


def test_nothing_to_bring_or_no_stages_never_pay() -> None:
    for nothing in (replace(WHAT, pages=0, size_bytes=0), replace(WHAT, stages=0)):
        assert not pays_by_layer(nothing, ALWAYS)
    assert not pays_by_layer(replace(WHAT, stages=1), ALWAYS)
    assert pays_by_layer(replace(WHAT, size_bytes=1, pages=1, stages=2, tokens=1), ALWAYS)


def small_model(tokens: int) -> LayerPull:
    """A prompt of a small model: 23 KiB for each token, 16 tokens in a page."""
    return LayerPull(tokens * 23 << 10, -(-tokens // 16), 8, tokens)


def test_copies_pay_for_long_prompts() -> None:
    assert [pays_by_layer(small_model(tokens), COPIED) for tokens in (16, 256, 2048, 8192)] == [
        *(False, False, True, True)
    ]


def test_tcp_hides_more_but_the_pass_loses_as_much() -> None:
    prompt = small_model(2048)
    gains = [seconds_by_request(prompt, c) - seconds_by_layer(prompt, c) for c in (COPIED, SENT)]
    assert 0 < gains[0] < gains[1]
    assert not any(pays_by_layer(small_model(tokens), SENT) for tokens in (16, 256, 2048, 8192))
    assert pays_by_layer(prompt, replace(SENT, slows=0.0)), "with a processor to spare"


def test_a_pass_that_loses_what_is_hidden_gains_nothing() -> None:
    """6 s less to wait; four messages, and a share of the 6.45 s that are hidden, are lost."""
    assert pays_by_layer(WHAT, replace(COSTS, slows=0.8))
    assert not pays_by_layer(WHAT, replace(COSTS, slows=0.9))


@given(whats, costs_drawn)
def test_by_layer_never_beats_its_last_stage_and_pays_only_if_it_is_quicker(
    what: LayerPull, costs: StreamCosts
) -> None:
    last_seconds = what.size_bytes / what.stages / costs.bytes_per_second
    assert seconds_by_layer(what, costs) >= last_seconds
    if pays_by_layer(what, costs):
        assert seconds_by_layer(what, costs) < seconds_by_request(what, costs)


@given(whats, costs_drawn, st.integers(1, 4096))
def test_a_longer_pass_never_hides_less(what: LayerPull, costs: StreamCosts, more: int) -> None:
    longer = replace(what, tokens=what.tokens + more)
    assert seconds_by_layer(longer, costs) <= seconds_by_layer(what, costs)
    assert pays_by_layer(longer, costs) or not pays_by_layer(what, costs)


def test_numbers_are_taken_in_turn_and_never_again() -> None:
    numbers = RightNumbers()
    assert [numbers.take() for _ in range(3)] == [1, 2, 3]
    numbers.free(3)
    assert 3 not in numbers and 2 in numbers and numbers.take() == 4


def test_words_in_use_are_passed_over() -> None:
    numbers = RightNumbers()
    stays = numbers.take()
    for _ in range(SLOTS - 1):
        numbers.free(numbers.take())
    assert numbers.take() == stays + SLOTS + 1
    assert stays in numbers and stays + SLOTS not in numbers


def test_with_all_words_in_use_numbers_go_on() -> None:
    """Such a right is not granted, as the table says; that is for the receiver to find."""
    numbers = RightNumbers()
    taken = [numbers.take() for _ in range(SLOTS)]
    beyond = numbers.take()
    assert beyond == SLOTS + 1 and beyond not in numbers
    numbers.free(beyond)
    assert all(number in numbers for number in taken)


@given(st.lists(st.one_of(st.none(), st.integers(0, 20)), max_size=300))
def test_rights_that_stand_have_words_of_their_own(steps: list[int | None]) -> None:
    """Take, or give back one of those that stand."""
    numbers, last = RightNumbers(), 0
    standing: list[int] = []
    for step in steps:
        if step is None or not standing:
            number = numbers.take()
            assert number > last
            last = number
            standing.append(number)
        else:
            numbers.free(standing.pop(step % len(standing)))
    assert len({number % SLOTS for number in standing}) == len(standing)
    assert all(number in numbers for number in standing)
