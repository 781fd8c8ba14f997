"""Behaviour tests run over both memory cores: they decide alike."""

from collections.abc import Callable

import pytest

from kvell.memory import Implementation, Layout
from tests.prefix.rehearsal import Rehearsal
from tests.prefix.story import Story

MakeStory = Callable[[Layout], Story]
MakeRehearsal = Callable[[Layout], Rehearsal]


@pytest.fixture(params=["python", "compiled"])
def tell(request: pytest.FixtureRequest) -> MakeStory:
    """Makes a story over a layout."""
    implementation: Implementation = request.param
    return lambda layout: Story(layout, implementation)


@pytest.fixture(params=["python", "compiled"])
def rehearse(request: pytest.FixtureRequest) -> MakeRehearsal:
    """Makes an engine without a model over a layout."""
    implementation: Implementation = request.param
    return lambda layout: Rehearsal(layout, implementation)
