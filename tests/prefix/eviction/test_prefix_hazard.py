"""The learned rule: classes of what requests leave, what each is worth by age, and its limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.prefix.eviction.hazard import (
    AGES,
    BOUNDS,
    HINTS,
    KINDS,
    OUTPUTS,
    REFIT_REQUESTS,
    REMEMBERED,
    Floats,
    age_bounds,
)
from tests.oracle.eviction.hazard import HazardTable, Run, class_of
from tests.oracle.eviction.hazard_fit import PARTIAL, hazards, index_of

FIRST, LATER, TWICE, THREE, MORE = 1, 2, 3, 4, 5
SHAPE = (KINDS, HINTS, OUTPUTS, AGES)


def zeros() -> tuple[Floats, Floats, Floats]:
    return np.zeros(SHAPE), np.zeros(SHAPE), np.zeros(SHAPE[:-1])


def access(table: HazardTable, now: int, *chain: int, output: int = 100) -> list[Run]:
    return table.access(chain, now, output_tokens=output)


def test_ages_grow_by_about_the_square_root_of_two() -> None:
    bounds = age_bounds()
    assert bounds[:6].tolist() == [0, 1, 2, 3, 4, 6]
    assert len(bounds) == AGES + 1
    assert np.all(bounds[10:] / bounds[9:-1] < 1.5)
    assert np.all(np.diff(bounds) > 0)


# ------------------------------------------------------------------------- classes


@given(st.integers(1, KINDS - 1), st.sampled_from([None, True, False]), st.integers(0, OUTPUTS - 1))
def test_every_class_has_its_number(kind: int, hint: bool | None, output: int) -> None:
    number = class_of(kind, hint, 2 ** (output + 4))
    found_kind, rest = divmod(number, HINTS * OUTPUTS)
    assert (found_kind, rest % OUTPUTS) == (kind, output)
    assert rest // OUTPUTS == {None: 0, True: 1, False: 2}[hint]


def test_output_lengths_beyond_the_ends_are_the_ends() -> None:
    assert class_of(FIRST, None, 0) == class_of(FIRST, None, 30)
    assert class_of(FIRST, None, 30) < class_of(FIRST, None, 31)
    assert class_of(FIRST, None, 510) == class_of(FIRST, None, 10**6) - 1


def test_a_partial_chunk_is_one_class_whatever_the_request() -> None:
    assert class_of(PARTIAL, None, 1) == class_of(PARTIAL, True, 5_000) == PARTIAL


def test_chunks_are_classed_by_how_often_they_were_used() -> None:
    table = HazardTable(100)
    assert access(table, 1, 1, 2, 3) == [Run(3, class_of(FIRST, None, 100))]
    assert access(table, 2, 1, 2, 4) == [
        Run(2, class_of(TWICE, None, 100)),
        Run(3, class_of(LATER, None, 100)),
    ]
    assert access(table, 3, 1, 5) == [
        Run(1, class_of(THREE, None, 100)),
        Run(2, class_of(FIRST, None, 100)),
    ]
    assert access(table, 4, 1) == access(table, 5, 1) == [Run(1, class_of(MORE, None, 100))]


def test_a_partial_last_chunk_is_apart() -> None:
    table = HazardTable(100)
    runs = table.access([1, 2, 3], 1, output_tokens=9, ends_partial=True)
    assert runs == [Run(2, class_of(FIRST, None, 9)), Run(3, PARTIAL)]
    assert table.access([7], 2, output_tokens=9, ends_partial=True) == [Run(1, PARTIAL)]
    assert table.access([], 3, output_tokens=9) == []


def test_keys_are_remembered_for_so_many_chunks_the_prompts_end_forgotten_first() -> None:
    table = HazardTable(1)
    access(table, 1, *range(REMEMBERED))
    access(table, 2, 100)
    assert access(table, 3, *range(REMEMBERED - 1)) == [
        Run(REMEMBERED - 1, class_of(TWICE, None, 100))
    ]
    assert access(table, 4, 100) == [Run(1, class_of(TWICE, None, 100))]
    assert access(table, 5, REMEMBERED - 1) == [Run(1, class_of(FIRST, None, 100))]


# ------------------------------------------------------------------- what is learned


def test_nothing_is_worth_more_before_anything_is_learned() -> None:
    table = HazardTable(100)
    for now in range(REFIT_REQUESTS - 1):
        access(table, now, now % 7)
    assert {table.value(number, age) for number in range(20) for age in (0, 5, 900)} == {0.0}


def taught(hints: bool) -> HazardTable:
    """Every other conversation returns after 10 requests, and the others never."""
    table = HazardTable(1_000)
    for now in range(20 * REFIT_REQUESTS):
        returns = now % 2 == 0
        key = now // 20 * 10 + now % 20 // 2 if returns else 10**6 + now
        again = returns and now % 20 >= 10
        hint = (returns and not again) if hints else None
        chain = [now // 20 * 5 + now % 10 // 2, 10**7 + key] if returns else [key, key + 10**6]
        table.access(chain, now, output_tokens=100, will_return=hint)
    return table


def test_who_says_that_he_returns_and_does_is_worth_more() -> None:
    table = taught(hints=True)
    told, untold = class_of(FIRST, True, 100), class_of(FIRST, False, 100)
    assert table.value(told, 5) > 5 * table.value(untold, 5)
    assert table.value(told, 5) > 5 * table.value(told, 500), "by then he would have come"


def test_a_hint_that_means_nothing_is_worth_nothing() -> None:
    table = HazardTable(1_000)
    for now in range(20 * REFIT_REQUESTS):
        table.access([now // 3], now, output_tokens=100, will_return=now % 5 < 2)
    told, untold = class_of(FIRST, True, 100), class_of(FIRST, False, 100)
    assert table.value(told, 1) == pytest.approx(table.value(untold, 1), rel=0.25)


@given(st.integers(0, KINDS * HINTS * OUTPUTS - 1), st.integers(0, 40_000), st.integers(0, 999))
def test_of_one_class_the_oldest_goes_first(number: int, age: int, later: int) -> None:
    assert TAUGHT.value(number, age) >= TAUGHT.value(number, age + later) >= 0


TAUGHT = taught(hints=False)


def test_an_age_beyond_all_buckets_has_a_value_too() -> None:
    assert TAUGHT.value(FIRST, BOUNDS[-1] + 10**6) == TAUGHT.value(FIRST, 10**9)


def test_a_prefix_is_worth_what_goes_on_from_it() -> None:
    table = taught(hints=True)
    runs = table.access([10**9, 10**9 + 1], 2_000, output_tokens=100, will_return=True)
    assert len(runs) == 1
    runs = table.access([10**9, 10**9 + 5], 2_001, output_tokens=100, will_return=False)
    values = [table.value(run.eviction_class, 0) for run in runs]
    assert values == sorted(values, reverse=True)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=60))
def test_memory_is_bounded(chains: list[list[int]]) -> None:
    table = HazardTable(1)
    for now, steps in enumerate(chains):
        chain = tuple(hash(tuple(steps[: i + 1])) for i in range(len(steps)))
        runs = table.access(chain, now, output_tokens=len(steps))
        assert runs[-1].end == len(chain)
        assert len(table._known) <= REMEMBERED


# -------------------------------------------------------------------------- the fit


def test_hazards_are_what_was_counted_where_much_was() -> None:
    entered, returned, events = zeros()
    entered[FIRST, 0, 2] = 100_000
    returned[FIRST, 0, 2] = 10_000
    events[FIRST, 0, 2] = 90_000
    assert hazards(entered, returned, events)[FIRST, 0, 2] == pytest.approx(0.1, rel=0.02)


def test_a_few_returns_do_not_make_a_class_better() -> None:
    entered, returned, events = zeros()
    entered[FIRST, 0, 2], entered[TWICE, 0, 2] = 100_000, 10
    returned[FIRST, 0, 2], returned[TWICE, 0, 2] = 10_000, 1.5
    events[FIRST, 0, 2], events[TWICE, 0, 2] = 90_000, 1
    chances = hazards(entered, returned, events)
    assert chances[TWICE, 0, 2] == pytest.approx(chances[FIRST, 0, 2], rel=0.05)


def test_many_returns_do() -> None:
    entered, returned, events = zeros()
    entered[FIRST, 0, 2] = entered[TWICE, 0, 2] = 100_000
    returned[FIRST, 0, 2], returned[TWICE, 0, 2] = 1_000, 3_000
    events[FIRST, 0, 2], events[TWICE, 0, 2] = 10_000, 30_000
    chances = hazards(entered, returned, events)
    assert np.all(chances[TWICE, 0, 2] > 2.5 * chances[FIRST, 0, 2])


def test_the_index_of_a_constant_hazard_is_the_same_at_every_age() -> None:
    widths = np.diff(age_bounds())
    chances = np.minimum(0.001 * widths, 0.5)[None, :]
    assert index_of(chances)[0, :12] == pytest.approx(0.001, rel=0.15)


def test_the_index_looks_ahead_and_falls() -> None:
    chances = np.zeros((1, AGES))
    chances[0, 10] = 0.9
    row = index_of(chances)[0]
    bounds = age_bounds()
    assert row[0] == pytest.approx(0.9 / (bounds[10] + 0.55 * (bounds[11] - bounds[10])))
    assert row[9] == row[0], "it is nearer by then, but the oldest goes first"
    assert np.all(row[11:] == 0)
