"""Memory that the machine lacks is refused; the error names the largest value that works."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.sizes import check_affordable
from kvell.errors import ChangeSomething
from kvell.vocabulary import GIB, MIB

RESERVE_BYTES = 100 * MIB


def check(
    pool_bytes: int, buffer_bytes: int | None = None, free_bytes: int = 24 * GIB
) -> ChangeSomething | None:
    options = EngineOptions(cpu_buffer_bytes=buffer_bytes)
    try:
        check_affordable(options, pool_bytes, RESERVE_BYTES, free_bytes, free_bytes)
    except ChangeSomething as problem:
        return problem
    return None


def largest_bytes(problem: ChangeSomething) -> int:
    found = re.search(r"use at most (--[a-z-]+) (\d+)MiB", problem.remedy)
    assert found is not None
    assert found[1] == problem.field
    return int(found[2]) * MIB


def test_what_fits_is_accepted() -> None:
    assert check(24 * GIB - RESERVE_BYTES) is None
    assert check(20 * GIB, 3 * GIB) is None


@pytest.mark.parametrize("pool_bytes", [900 * 10**9, 24 * GIB])
def test_the_largest_pool_is_told_and_would_do(pool_bytes: int) -> None:
    problem = check(pool_bytes)
    assert problem is not None
    assert problem.field == "--kv-memory"
    assert check(largest_bytes(problem)) is None
    assert check(largest_bytes(problem) + MIB) is not None


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_pool_and_a_buffer_that_only_fit_alone_are_refused(pool: int, buffer: int) -> None:
    problem = check(pool * GIB, buffer * GIB)
    fits = (pool + buffer) * GIB + RESERVE_BYTES <= 24 * GIB
    assert (problem is None) is fits
    if problem is not None and problem.field == "--cpu-buffer" and "leave" not in problem.remedy:
        assert check(pool * GIB, largest_bytes(problem)) is None


def test_a_machine_without_any_room_names_no_value() -> None:
    problem = check(GIB, free_bytes=RESERVE_BYTES // 2)
    assert problem is not None
    assert "use at most" not in problem.remedy
