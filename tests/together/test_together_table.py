"""The table of pairs: it is complete, its page is up to date, and its tests exist."""

from importlib import import_module
from pathlib import Path

import pytest

from tests.models.cases import long_unless
from tests.together.engines import ALONE
from tests.together.mechanisms import (
    CHANGES_ANSWERS,
    SIGNS,
    Run,
    engine_with,
    expected,
    requests_for,
)
from tests.together.pairs import ENGINE, MECHANISMS, WHY_NOT, WITH, page, pairs, shown_by
from tests.together.sets import SETS

PAGE = Path(__file__).parents[2] / "docs" / "together.md"


def test_every_pair_has_a_test_or_a_reason() -> None:
    assert len(list(pairs())) == len(MECHANISMS) * (len(MECHANISMS) + 1) // 2
    assert {pair for pair in pairs() if not shown_by(*pair)} == set(WHY_NOT)


def test_the_page_is_the_tables() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.together.pairs > docs/together.md"


@pytest.mark.parametrize("pair", list(pairs()), ids=" and ".join)
def test_what_the_table_names_exists(pair: tuple[str, str]) -> None:
    test = shown_by(*pair)
    if not test:
        return
    path, _, name = test.partition("::")
    function, _, case = name.rstrip("]").partition("[")
    module = import_module(path.removesuffix(".py").replace("/", "."))
    assert callable(getattr(module, function))
    if case and pair[1] in ENGINE:
        assert tuple(case.split("+")) in SETS
    elif case:
        assert f"{path}::{function}" in WITH.values()
        assert (case,) in ALONE


SLOW = {"images", "int8"}
"""Mechanisms that run in the long suite, but for those of ``FAST``."""
FAST = (("draft", "images"), ("memory", "int8"), ("buffer", "int8"))


def is_fast(mechanisms: tuple[str, ...]) -> bool:
    return not SLOW & set(mechanisms) or mechanisms in FAST


@pytest.mark.parametrize(
    "mechanisms",
    [pytest.param(some, id="+".join(some), marks=long_unless(is_fast(some))) for some in SETS],
)
def test_answers_are_those_of_an_engine_without_pressure(mechanisms: tuple[str, ...]) -> None:
    run = Run(engine_with(mechanisms))
    run.serve(requests_for(mechanisms))
    assert run.outputs == expected(frozenset(mechanisms) & frozenset(CHANGES_ANSWERS))
    idle = [name for name in mechanisms if not SIGNS[name](run)]
    assert idle == [], "mechanisms that did nothing"
