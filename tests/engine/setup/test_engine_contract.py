"""The memory contract: every byte named, and what fits stated before the run."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.setup.contract import EXAMPLE_TOKENS, MemoryContract, make_contract, size
from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.sizes import check_affordable
from kvell.errors import ChangeSomething
from kvell.memory import plan_layout, requests_that_fit
from kvell.vocabulary import GIB, KIB, MIB
from tests.pages.pools import layers

LAYOUT = plan_layout(layers([512, 512, 512, 512, 512, 0] * 3), 192 * MIB)


def contract(max_model_len: int = 8192) -> MemoryContract:
    return make_contract("gemma", LAYOUT, 500 * MIB, 64 * MIB, max_model_len)


def test_the_total_is_weights_pool_and_reserve() -> None:
    made = contract()
    assert made.kv_pool_bytes == LAYOUT.pool_bytes
    assert made.total_bytes == 500 * MIB + LAYOUT.pool_bytes + 64 * MIB


@pytest.mark.parametrize(
    ("max_model_len", "lengths"),
    [
        (512, [512]),
        (1024, [1024]),
        (8192, [1024, 4096, 8192]),
        (100_000, [*EXAMPLE_TOKENS, 100_000]),
    ],
)
def test_what_fits_is_said_for_examples_and_the_longest(
    max_model_len: int, lengths: list[int]
) -> None:
    fits = contract(max_model_len).requests_that_fit
    assert [tokens for tokens, _ in fits] == lengths
    assert all(count == requests_that_fit(LAYOUT, tokens) for tokens, count in fits)


def test_groups_say_what_a_token_and_a_page_cost() -> None:
    sliding, full = contract().groups
    assert (sliding.name, sliding.layers, sliding.token_bytes) == ("sliding(512)", 15, 15 * KIB)
    assert (sliding.page_tokens, sliding.page_bytes, sliding.pages_per_large) == (16, 245_760, 1)
    assert (full.layers, full.page_bytes, full.padding_bytes) == (3, 49_152, 0)


def test_machines_get_all_of_it_as_json() -> None:
    told = json.loads(json.dumps(contract().as_dict()))
    assert told["total_bytes"] == contract().total_bytes
    assert told["groups"][1]["name"] == "full"
    assert told["requests_that_fit"][0][0] == 1024


def test_people_get_a_line_for_every_part() -> None:
    lines = contract().lines()
    assert lines[0] == "memory contract for gemma"
    assert "500.0 MiB" in lines[1]
    assert "819 large pages of 240.0 KiB" in lines[2]
    assert "15 layers, 15.0 KiB a token, pages of 16 tokens = 240.0 KiB" in lines[3]
    assert "64.0 MiB" in lines[5]
    assert lines[-2] == "  longest request     8,192 tokens"
    assert lines[-1].startswith("  together            ")
    assert " requests of 1,024 tokens, " in lines[-1]
    assert all(len(line) < 80 for line in lines)


def test_long_lines_are_wrapped() -> None:
    named = replace(contract(), model="/a/path" * 20, dtype="bfloat16")
    assert all(len(line) < 80 for line in named.lines())
    assert "".join(line.strip() for line in named.lines()[:3]).endswith("bfloat16")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "      0 B"),
        (1023, "   1023 B"),
        (KIB, "    1.0 KiB"),
        (1536 * KIB, "    1.5 MiB"),
        (3 * GIB, "    3.0 GiB"),
    ],
)
def test_sizes_read_the_same_way_everywhere(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_processes_for_grammars_are_part_of_the_promise() -> None:
    without = make_contract("gemma", LAYOUT, 0, 0, 8192)
    with_grammars = replace(without, grammar_bytes=200 * MIB)
    assert with_grammars.contract_bytes - without.contract_bytes == 200 * MIB
    assert with_grammars.parts()["grammar_bytes"] == 200 * MIB
    assert "  grammars              200.0 MiB" in with_grammars.lines()
    assert not any("grammars" in line for line in without.lines())


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
