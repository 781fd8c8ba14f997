"""The memory contract: every byte named, and what fits stated before the run."""

import json
from dataclasses import replace

import pytest

from kvell.engine.setup.contract import EXAMPLE_TOKENS, MemoryContract, make_contract, size
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
    with_grammars = make_contract("gemma", LAYOUT, 0, 0, 8192, grammar_bytes=200 * MIB)
    without = make_contract("gemma", LAYOUT, 0, 0, 8192)
    assert with_grammars.contract_bytes - without.contract_bytes == 200 * MIB
    assert with_grammars.parts()["grammar_bytes"] == 200 * MIB
    assert "  grammars              200.0 MiB" in with_grammars.lines()
    assert not any("grammars" in line for line in without.lines())
