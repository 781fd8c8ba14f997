"""The simulator of eviction alone: hits, pinned prompts, and that the rules are told apart."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.managers.chunk_cache import (
    Belady,
    ByHazard,
    Ordered,
    Prompt,
    distinct_chunks,
    hit_rate,
    prompt_of,
)
from bench.managers.yardstick import WRONG_HINTS, Outcome, hints, main, measured
from kvell.prefix.eviction.hazard import REFIT_REQUESTS
from kvell.simulator.traces.hints import is_wrong
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import write_trace

SIZE = 4


def prompt(*chain: int, tokens: int | None = None) -> Prompt:
    return Prompt(chain, len(chain) * SIZE if tokens is None else tokens, 10, SIZE)


def test_leading_chunks_hit_and_a_partial_one_for_what_it_holds() -> None:
    prompts = [prompt(1, 2, 3, tokens=10), prompt(1, 2, 3, tokens=10), prompt(1, 9, 3)]
    assert hit_rate(prompts, 10, Ordered()) == (10 + 4) / 32


def test_the_oldest_prompt_goes_first_its_end_before_its_beginning() -> None:
    prompts = [prompt(1, 2), prompt(3, 4), prompt(5), prompt(1, 2), prompt(3, 4)]
    assert hit_rate(prompts[:4], 4, Ordered()) == 4 / (7 * SIZE), "2 went, 1 stayed"
    cache = Ordered()
    hit_rate(prompts, 4, cache)
    assert [key in cache for key in range(1, 6)] == [True, True, True, True, False]


def test_who_knows_the_future_keeps_what_returns() -> None:
    prompts = [prompt(1), prompt(2), prompt(3), prompt(1), prompt(4), prompt(1)]
    assert hit_rate(prompts, 2, Ordered()) == 1 / 6
    assert hit_rate(prompts, 2, Belady(prompts)) == 2 / 6


def test_a_prompt_longer_than_the_cache_leaves_its_beginning() -> None:
    for cache in (Ordered(), ByHazard(2)):
        assert hit_rate([prompt(1, 2, 3, 4), prompt(1, 2, 3, 4)], 2, cache) == 2 / 8


def grown(steps: list[tuple[int, int]]) -> list[Prompt]:
    """Prompts of a few conversations; one chunk always follows the same one."""
    return [
        prompt(*(100 * talk + i for i in range(length)), tokens=SIZE * length - talk % 2)
        for talk, length in steps
    ]


some_prompts = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=REFIT_REQUESTS - 1
).map(grown)


@given(some_prompts, st.integers(1, 20))
def test_what_has_learned_nothing_is_the_least_recently_used(
    prompts: list[Prompt], capacity: int
) -> None:
    assert hit_rate(prompts, capacity, ByHazard(capacity)) == hit_rate(prompts, capacity, Ordered())


@given(some_prompts, st.integers(1, 20))
def test_nobody_beats_the_future_and_none_holds_more_than_fits(
    prompts: list[Prompt], capacity: int
) -> None:
    best = hit_rate(prompts, capacity, Belady(prompts))
    assert best >= hit_rate(prompts, capacity, Ordered())
    rule = ByHazard(capacity)
    assert best >= hit_rate(prompts, capacity, rule)
    assert sum(key in rule for key in range(700)) == min(capacity, distinct_chunks(prompts))


def returning(count: int) -> list[Prompt]:
    """Half of the conversations return once, after twelve requests; hints alone tell which."""
    return [prompt(i - 12 if i % 24 >= 12 and i % 2 else i, 10_000 + i) for i in range(count)]


def test_the_rule_learns_what_hints_are_worth() -> None:
    prompts = returning(2_000)
    told = [prompt.chain[0] == i and i % 2 == 1 for i, prompt in enumerate(prompts)]
    blind = hit_rate(prompts, 12, ByHazard(12))
    assert hit_rate(prompts, 12, ByHazard(12, told)) > blind + 0.05


def test_a_hint_says_whether_the_last_full_chunk_comes_back() -> None:
    prompts = [prompt(1, 2, 3, tokens=9), prompt(1, 2), prompt(1, 9, tokens=7), prompt(1, 8)]
    prompts += [prompt(50, tokens=3)]
    truth = [True, False, True, False, False]
    assert [told != is_wrong(i, WRONG_HINTS) for i, told in enumerate(hints(prompts))] == truth


def test_one_hint_in_ten_is_wrong() -> None:
    assert np.mean([is_wrong(i, WRONG_HINTS) for i in range(5_000)]) == pytest.approx(0.1, abs=0.01)


def test_the_gap_is_from_least_recently_used_to_belady() -> None:
    outcome = Outcome("t", 5, 10, 0.2, 0.6, 0.3, 0.6)
    assert outcome.gap_closed(outcome.rule) == pytest.approx(0.25)
    assert outcome.gap_closed(outcome.rule_with_hints) == 1


def test_a_cache_holds_its_percent_of_the_distinct_chunks() -> None:
    prompts = returning(100)
    assert measured("t", prompts, 10).capacity_chunks == -(-distinct_chunks(prompts) // 10)


def test_the_command_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        TraceRow(i, 2 * SIZE, 10, np.asarray(one.chain, np.int64), SIZE)
        for i, one in enumerate(returning(200))
    ]
    assert prompt_of(rows[3]) == returning(200)[3]
    write_trace(tmp_path / "small.jsonl.gz", rows)
    out = tmp_path / "out.json"
    command = ["yardstick", "--traces", str(tmp_path), "--trace", "small", "--json", str(out)]
    monkeypatch.setattr("sys.argv", command)
    main()
    written = json.loads(out.read_text())["figures"]
    assert [one["percent"] for one in written] == [5, 10]
    assert all(one["least_recently_used"] <= one["belady"] for one in written)
