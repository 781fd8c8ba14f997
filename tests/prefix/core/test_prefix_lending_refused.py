"""Who may not have first tokens elsewhere, and which ones."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvell.pages.layout import GroupSpec
from tests.pages.pools import dropping, group, pool_of
from tests.prefix.story import Story, ints

TEXT = list(range(100, 140))


@pytest.fixture
def story() -> Story:
    return Story(pool_of(8, group(4, 2)))


@pytest.mark.parametrize(
    ("away", "match"),
    [
        (-4, "-4 of 33 computed tokens"),
        (36, "36 of 33 computed tokens"),
        (6, "6 tokens end inside a page"),
    ],
)
def test_numbers_of_tokens_that_cannot_be_away(story: Story, away: int, match: str) -> None:
    handle = story.open(TEXT[:40])
    story.compute(handle, 33)
    before = story.check()
    with pytest.raises(ValueError, match=match):
        story.core.send_away(handle, away)
    assert story.check() == before


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (dropping(4, 2, 12), "its model drops tokens"),
        (replace(group(4, 2), counts_images=True), "counts images in pages of the text"),
        (group(4, 2, 8), "its model has no full attention"),
    ],
)
def test_models_whose_tokens_cannot_be_away(spec: GroupSpec, match: str) -> None:
    story = Story(pool_of(8, spec))
    handle = story.open(TEXT[:20])
    story.compute(handle, 8)
    with pytest.raises(ValueError, match=match):
        story.core.send_away(handle, 8)


@pytest.mark.parametrize(
    "opened",
    [
        lambda story: story.core.open(ints(TEXT[:20]), "", 5),
        lambda story: story.core.reserve(ints([2]), 5),
    ],
)
def test_who_only_holds_sends_nothing_away(story: Story, opened: Callable[[Story], int]) -> None:
    with pytest.raises(ValueError, match="it is a lease or a reservation"):
        story.core.send_away(opened(story), 0)


def test_who_still_copies_sends_nothing_away(story: Story) -> None:
    story.serve(TEXT[:10])
    handle = story.open(TEXT[:20])
    assert story.core.hit_tokens(handle) == 10
    with pytest.raises(ValueError, match="copies to its pages are pending"):
        story.core.send_away(handle, 8)
    story.compute(handle, 12)
    story.core.send_away(handle, 8)
    story.check()


def test_who_is_gone_sends_nothing_away(story: Story) -> None:
    handle = story.open(TEXT[:8])
    story.close(handle)
    with pytest.raises(KeyError, match=str(handle)):
        story.core.send_away(handle, 0)
