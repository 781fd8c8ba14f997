"""The table of pairs: it is complete, its page is up to date, and its tests exist."""

from importlib import import_module
from pathlib import Path

import pytest

from tests.together.engines import ALONE
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
