"""The calls of a plain chat request: each number may fall, and rises only with its budget."""

from pathlib import Path

import pytest

from scripts.calls.trace import Ladder, TooBusyError, by_token, ladders, low

BUDGETS = {
    "front: request of one token": {"calls": 354, "functions": 258, "files": 48},
    "front: each further token": {"calls": 49, "functions": 42, "files": 20},
    "instance: request of one token": {"calls": 469, "functions": 331, "files": 68},
    "instance: each further token": {"calls": 183, "functions": 168, "files": 40},
}
"""Calls of Kvell's functions; ``python -m scripts.calls`` prints this table."""
SLACK = {"calls": 40, "functions": 18, "files": 2}
"""The calls of one heartbeat: on a busy machine, each request may have one."""
SLACK_OF_TOKENS = {"calls": 6, "functions": 2, "files": 1}


@pytest.fixture(scope="module")
def traced(shallow_path: Path) -> dict[str, Ladder]:
    try:
        return ladders(shallow_path.parent)
    except TooBusyError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("work", BUDGETS)
def test_a_plain_request_calls_no_more_than_its_budget(
    traced: dict[str, Ladder], work: str
) -> None:
    budget = BUDGETS[work]
    slack = SLACK_OF_TOKENS if "each" in work else SLACK
    figures = traced[work].figures()
    above = {
        kind: f"{figures[kind]} of {budget[kind]}"
        for kind in budget
        if figures[kind] > budget[kind] + slack[kind]
    }
    assert not above, (
        f"{work}: shorten the path, or change the budget in the same commit "
        "(`python -m scripts.calls` prints all)"
    )


def test_calls_are_counted_by_token_without_those_of_chance() -> None:
    short = ["a:begin", "a:step", "b:end"]
    long = ["a:begin", *["c:beat", *["a:step"], *["b:draw"] * 2] * 41, *["b:end"]]
    tokens = by_token([*long, "c:beat"], dict.fromkeys(short, 1))
    assert len(tokens) == 40
    assert low(tokens, 0.2) == {"a:step": 1, "b:draw": 2, "c:beat": 1}
    samples = [{"a:step": count, "c:beat": count > 1} for count in (1, 2, 1, 3, 1)]
    assert low(samples, 0.2) == {"a:step": 1}
    assert Ladder({"a:step": 1, "a:begin": 1, "b:draw": 2}).figures() == {
        "calls": 4,
        "functions": 3,
        "files": 2,
    }
