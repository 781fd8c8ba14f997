"""What prompts take follows what they took: steps, tokens and pairs apart, and all together."""

import random
from collections.abc import Callable, Sequence
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvell.cluster.routing.pace import Pace, PromptWork
from kvell.cost.prices import USUAL_PRICES, ExecCosts, pairs

TRUE = ExecCosts(request_seconds=0.01, token_seconds=1e-3, pair_seconds=5e-7)
Machine = Callable[[PromptWork], float]


def work_of(tokens: int, cached: int = 0, costs: ExecCosts = TRUE) -> PromptWork:
    return PromptWork(costs.request_seconds, max(1, tokens - cached), pairs(tokens, cached))


def takes(costs: ExecCosts, slows: float = 1.0) -> Machine:
    return lambda work: (
        slows
        * (
            costs.request_seconds
            + work.tokens * costs.token_seconds
            + work.pairs * costs.pair_seconds
        )
    )


def misses(pace: Pace, machine: Machine, sizes: Sequence[int]) -> list[float]:
    """Serve prompts; return how far the time of each was missed before it was known."""
    seen = []
    for tokens in sizes:
        work = work_of(tokens)
        seconds = machine(work)
        seen.append(abs(pace.seconds(work) / seconds - 1))
        pace.note(work, seconds)
    return seen


def mixed_sizes(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [int(2 ** draw.uniform(6, 11.6)) for _ in range(count)]


def test_right_prices_are_kept() -> None:
    assert max(misses(Pace(TRUE), takes(TRUE), mixed_sizes(60))) < 1e-6


@pytest.mark.parametrize("slows", [0.5, 3.0])
def test_the_first_prompt_sets_the_factor(slows: float) -> None:
    assert max(misses(Pace(TRUE), takes(TRUE, slows), mixed_sizes(30))[1:]) < 1e-6


@pytest.mark.parametrize("slows", [0.5, 1.0, 4.0])
def test_it_follows_a_change(slows: float) -> None:
    pace = Pace(TRUE)
    misses(pace, takes(TRUE, 2.0), mixed_sizes(20))
    assert misses(pace, takes(TRUE, slows), mixed_sizes(40, 1))[-1] < 0.05


def test_one_disturbed_prompt_moves_it_little() -> None:
    pace = Pace(TRUE)
    misses(pace, takes(TRUE), mixed_sizes(20))
    before = pace.seconds(work_of(500))
    pace.note(work_of(500), 100 * before)
    assert before <= pace.seconds(work_of(500)) * (1 + 1e-9)
    assert pace.seconds(work_of(500)) < 1.05 * before


@pytest.mark.parametrize(
    ("wrong", "most"),
    [
        (structs.replace(TRUE, pair_seconds=0.0, token_seconds=1.2e-3), 0.05),
        (structs.replace(TRUE, pair_seconds=2e-6, token_seconds=5e-4), 0.5),
        (USUAL_PRICES, 0.2),
    ],
    ids=["no pairs", "too many pairs", "another machine"],
)
def test_it_corrects_what_a_calibration_took_for_the_other(wrong: ExecCosts, most: float) -> None:
    seen = misses(Pace(wrong), takes(TRUE), mixed_sizes(60))[20:]
    assert max(seen) < most
    assert sorted(seen)[len(seen) // 2] < most / 2


def test_a_cost_is_never_negative() -> None:
    """These prompts take the less the more pairs they have."""
    pace = Pace(TRUE)
    for tokens in mixed_sizes(80):
        pace.note(work_of(tokens), 1.0 / tokens)
    work = PromptWork(0.0, 0, 10**6)
    assert pace.seconds(work) <= pace.seconds(PromptWork(0.0, 10, 10**6))


amounts = st.builds(PromptWork, st.floats(0.0, 1e3), st.integers(0, 10**6), st.integers(0, 10**12))


@given(st.lists(st.tuples(amounts, st.floats(0.0, 1e9)), max_size=40), amounts)
def test_its_times_are_finite_and_above_zero(
    noted: list[tuple[PromptWork, float]], asked: PromptWork
) -> None:
    pace = Pace(TRUE)
    for work, seconds in noted:
        pace.note(work, seconds)
        assert isfinite(pace.seconds(asked))
        assert pace.seconds(asked) > 0
