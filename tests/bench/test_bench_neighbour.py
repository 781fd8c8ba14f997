"""The bench beside a neighbour: quiet and disturbed rounds in turn, answers that must be equal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
from rich.console import Console

from bench.busy_program import busy_program
from bench.engine import neighbour
from bench.engine.neighbour import AS_IF_ALONE, GIVES_WAY, Case, Rate, rounds_of, table
from kvell.llm import LLM
from tests.bench.instant_llm import InstantLLM

CASES = [Case("batch 2", 2, 4, 5), Case("prompt", 1, 40, 1)]


def fakes(*tokens: int) -> tuple[dict[str, LLM], list[str]]:
    asked: list[str] = []
    names = (GIVES_WAY, AS_IF_ALONE)
    made = {name: InstantLLM(name, token, asked) for name, token in zip(names, tokens, strict=True)}
    return cast(dict[str, LLM], made), asked


def test_a_real_neighbour_is_busy_until_it_is_ended() -> None:
    with busy_program():
        pass


def test_quiet_and_disturbed_rounds_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, asked = fakes(3, 3)

    @contextmanager
    def noted() -> Iterator[None]:
        asked.append("comes")
        yield
        asked.append("goes")

    monkeypatch.setattr(neighbour, "busy_program", noted)
    rates = rounds_of(engines, CASES, 2)
    first = [AS_IF_ALONE, GIVES_WAY, GIVES_WAY, AS_IF_ALONE]
    assert asked[:10] == [*first, "comes", *first, "goes"]
    assert asked[10:14] == [GIVES_WAY, AS_IF_ALONE, AS_IF_ALONE, GIVES_WAY]
    assert [one.beside for one in rates] == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4
    assert all(one.tokens_per_second > 0 for one in rates)


def test_answers_that_differ_end_the_bench() -> None:
    engines, _ = fakes(3, 4)
    with pytest.raises(SystemExit, match="answers differ: batch 2, round 0"):
        rounds_of(engines, CASES, 1)


def test_a_prompt_counts_its_own_tokens_and_a_decode_those_it_makes() -> None:
    assert [case.counted for case in CASES] == [10, 40]


def test_shares_are_of_the_quiet_median_as_if_alone() -> None:
    rates = [Rate("batch 2", AS_IF_ALONE, False, value) for value in (90.0, 100.0, 130.0)]
    rates += [Rate("batch 2", GIVES_WAY, beside, 80.0) for beside in (False, True)]
    rates += [Rate("batch 2", AS_IF_ALONE, True, 40.0)]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table(rates, CASES[:1]))
    text = shown.get()
    assert "100.0 (90.0–130.0)  1.00" in text
    assert text.count("0.80") == 2
    assert "0.40" in text
