"""Engines with each mechanism and each pair of them: exact tokens under pressure, and all act."""

import pytest

from tests.models.cases import long_unless
from tests.together.mechanisms import (
    CHANGES_ANSWERS,
    SIGNS,
    Run,
    engine_with,
    expected,
    requests_for,
)
from tests.together.sets import SETS

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
