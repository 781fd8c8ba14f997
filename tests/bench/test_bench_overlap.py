"""The bench of planning ahead: turns, ratios, and answers that must be equal."""

from typing import cast

import pytest
from rich.console import Console

from bench.engine.overlap import Round, measure, table
from kvell.llm import LLM
from tests.bench.instant_llm import InstantLLM


def fakes(*tokens: int) -> tuple[list[LLM], list[str]]:
    asked: list[str] = []
    made = [InstantLLM(name, token, asked) for name, token in zip("ab", tokens, strict=True)]
    return cast(list[LLM], made), asked


def test_who_goes_first_alternates() -> None:
    engines, asked = fakes(3, 3)
    rounds = measure(engines, batch=2, prompt_tokens=4, max_tokens=5, rounds=4)
    assert len(rounds) == 4
    assert "".join(asked) == "baabbaab"
    assert all(one.in_turn > 0 and one.ahead > 0 for one in rounds)


def test_answers_that_differ_end_the_bench() -> None:
    engines, _ = fakes(3, 4)
    with pytest.raises(SystemExit, match="answers differ at batch 2, round 0"):
        measure(engines, batch=2, prompt_tokens=4, max_tokens=5, rounds=1)


def test_the_ratio_is_the_median_of_the_rounds_own() -> None:
    rounds = [Round(10, 20, 1, 1), Round(100, 90, 1, 2), Round(10, 11, 2, 1)]
    console = Console(width=110)
    with console.capture() as shown:
        console.print(table({8: rounds}))
    assert "1.100" in shown.get()
    assert "10.0 (100.0)" in shown.get()
