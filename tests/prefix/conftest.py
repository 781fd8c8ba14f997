"""Behaviour tests run over both memory cores: they decide alike."""

from collections.abc import Callable

import pytest

from kvell.memory import Layout
from tests.oracle.factory import Implementation
from tests.prefix.rehearsal import Rehearsal
from tests.prefix.story import Story

MakeStory = Callable[[Layout], Story]
MakeRehearsal = Callable[[Layout], Rehearsal]


@pytest.fixture(params=["oracle", "compiled"])
def tell(request: pytest.FixtureRequest) -> MakeStory:
    """Makes a story over a layout."""
    implementation: Implementation = request.param
    return lambda layout: Story(layout, implementation)


@pytest.fixture(params=["oracle", "compiled"])
def rehearse(request: pytest.FixtureRequest) -> MakeRehearsal:
    """Makes an engine without a model over a layout."""
    implementation: Implementation = request.param
    return lambda layout: Rehearsal(layout, implementation)
