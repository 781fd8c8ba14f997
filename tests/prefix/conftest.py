"""Behaviour tests run over both memory cores: they decide alike."""

from collections.abc import Callable

import pytest

from kvell.memory import Implementation, Layout
from tests.prefix.story import Story

MakeStory = Callable[[Layout], Story]


@pytest.fixture(params=["python", "compiled"])
def tell(request: pytest.FixtureRequest) -> MakeStory:
    """Makes a story over a layout."""
    implementation: Implementation = request.param
    return lambda layout: Story(layout, implementation)
