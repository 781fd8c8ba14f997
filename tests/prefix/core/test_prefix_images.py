"""Images: whole or not at all, found by content, and embeddings that go when they are read."""

from dataclasses import replace

import numpy as np
import pytest

from kvell.pages.layout import GroupKind, Layout
from kvell.prefix.groups.facts import ImageSpan, facts_of
from tests.oracle.index.seen import cuts_image
from tests.pages.pools import group, images, pool_of, state
from tests.prefix.mixes import Prompt, text
from tests.prefix.rehearsal import Rehearsal

CROSS, VISION = GroupKind.CROSS, GroupKind.VISION


def with_image(before: int, content: int, tokens: int, image_tokens: int, after: int) -> Prompt:
    words = [*range(before), *[-content] * tokens, *range(500, 500 + after)]
    return Prompt(words, np.asarray([[before, tokens, image_tokens]], np.int32))


def cross(num_large: int = 40) -> Layout:
    return pool_of(num_large, group(4, 2), images(CROSS, 4, 1))


def test_equal_images_hit_and_others_do_not() -> None:
    rehearsal = Rehearsal(cross())
    assert rehearsal.finish(with_image(6, 1, 1, 10, 6)) == 0
    assert rehearsal.finish(with_image(6, 1, 1, 10, 9)) == 13
    assert rehearsal.peek(with_image(6, 2, 1, 10, 9)) == 6, "the text before it"


def test_a_hit_takes_the_pages_of_its_images() -> None:
    rehearsal = Rehearsal(cross())
    first = rehearsal.serve(with_image(6, 1, 1, 10, 6), 13)
    second = rehearsal.open(with_image(6, 1, 1, 10, 9), "", "")
    assert len(rehearsal.pages(first)[1]) == 3
    assert rehearsal.pages(second)[1] == rehearsal.pages(first)[1]


def test_an_image_has_pages_of_its_own_however_few_its_tokens() -> None:
    rehearsal = Rehearsal(cross())
    prompt = Prompt([5, -1, -2, 6], np.asarray([[1, 1, 5], [2, 1, 1]], np.int32))
    assert len(rehearsal.pages(rehearsal.serve(prompt, 4))[1]) == 2 + 1


def test_an_image_begins_with_its_first_token() -> None:
    rehearsal = Rehearsal(cross())
    request = rehearsal.serve(with_image(6, 1, 1, 10, 6), 6)
    assert not rehearsal.pages(request)[1]
    rehearsal.reach(request, 7)
    assert len(rehearsal.pages(request)[1]) == 3


def test_part_of_an_image_is_no_image() -> None:
    """Its three pages are large pages of their own, of one age: a newcomer takes one of them."""
    rehearsal = Rehearsal(cross(6))
    rehearsal.finish(with_image(6, 1, 1, 10, 3))
    rehearsal.next_step()
    rehearsal.finish(with_image(1, 2, 1, 4, 14))
    named = [e for e in rehearsal.check().index if e.group == 1 and e.end == 7]
    assert len(named) < 3
    assert rehearsal.peek(with_image(6, 1, 1, 10, 9)) <= 6


def test_images_of_one_age_go_one_after_the_other() -> None:
    """All pages of an image have one place in the order, whatever the image's place."""
    rehearsal = Rehearsal(pool_of(40, group(4, 2), images(CROSS, 2, 2)))
    rows = np.asarray([[1, 1, 6], [4, 1, 6], [7, 1, 6]], np.int32)
    rehearsal.finish(Prompt([0, -1, 5, 5, -2, 6, 6, -3, 7], rows))
    state = rehearsal.check()
    keys: dict[int, set[tuple[int, int, int]]] = {}
    for entry in state.index:
        if entry.group == 1:
            keys.setdefault(entry.end, set()).add(state.keys[1][entry.page])
    assert {end: len(found) for end, found in keys.items()} == {2: 1, 5: 1, 8: 1}
    assert len(set.union(*keys.values())) == 3


def test_no_hit_ends_inside_an_image() -> None:
    rehearsal = Rehearsal(pool_of(40, group(4, 2), images(VISION, 4, 2)))
    rehearsal.finish(with_image(5, 1, 10, 10, 3))
    assert rehearsal.peek(with_image(5, 1, 10, 10, 0)) == 5, "the image's last token is left"
    assert rehearsal.peek(with_image(5, 1, 10, 10, 1)) == 15


def test_embeddings_are_there_whole_and_go_page_by_page() -> None:
    rehearsal = Rehearsal(pool_of(40, group(4, 2), images(VISION, 4, 1)))
    request = rehearsal.open(with_image(3, 1, 10, 10, 3), "", "")
    held = []
    for until in (3, 4, 8, 12, 13, 14):
        rehearsal.reach(request, until)
        held.append(len(rehearsal.pages(request)[1]))
    assert held == [0, 3, 2, 1, 0, 0]
    assert len(rehearsal.check().keys[1]) == 3, "kept for a later prompt about the same image"


def test_the_same_image_after_other_text_takes_what_was_kept() -> None:
    rehearsal = Rehearsal(pool_of(40, group(4, 2), images(VISION, 4, 1)))
    rehearsal.finish(with_image(3, 1, 10, 10, 6))
    held = rehearsal.open(with_image(8, 1, 10, 10, 2), "", "")
    assert len(rehearsal.pages(held)[1]) == 3
    other = rehearsal.open(with_image(8, 2, 10, 10, 2), "", "")
    assert not rehearsal.pages(other)[1], "another image"
    salted = rehearsal.open(with_image(8, 1, 10, 10, 2), "", "salt")
    assert not rehearsal.pages(salted)[1], "nothing is shared with other salts"
    rehearsal.reach(held, 20)
    assert not rehearsal.pages(held)[1]
    assert len(rehearsal.check().keys[1]) == 3


def test_a_hit_beyond_an_image_asks_for_no_embedding() -> None:
    rehearsal = Rehearsal(pool_of(40, group(4, 2), images(VISION, 4, 1)))
    prompt = with_image(3, 1, 10, 10, 6)
    rehearsal.finish(prompt)
    again = rehearsal.open(Prompt([*prompt.tokens, 9], prompt.images), "", "")
    rehearsal.reach(again, 20)
    assert not rehearsal.pages(again)[1]


def test_embeddings_may_wait_in_the_pages_that_will_overwrite_them() -> None:
    rehearsal = Rehearsal(pool_of(40, replace(group(4, 2), holds_embeddings=True)))
    request = rehearsal.open(with_image(3, 1, 10, 10, 8), "", "")
    counts = []
    for until in (3, 4, 10, 13, 17):
        rehearsal.reach(request, until)
        counts.append(len(rehearsal.pages(request)[0]))
    assert counts == [1, 4, 4, 4, 5]


# ----------------------------------------------------- images among the tokens of a page


def test_pages_that_count_images_hold_them_beside_the_text() -> None:
    rehearsal = Rehearsal(pool_of(40, replace(group(4, 2), counts_images=True)))
    request = rehearsal.serve(with_image(3, 1, 1, 9, 4), 8)
    assert len(rehearsal.pages(request)[0]) == 5, "8 tokens of text, 9 of the image"
    rehearsal.close(request, renew=True)
    assert rehearsal.check().index == ()
    assert rehearsal.finish(text(*range(9))) == 0
    assert rehearsal.finish(text(*range(12))) == 9, "text alone is shared as ever"


def test_a_mixed_prompt_keeps_no_state_either() -> None:
    rehearsal = Rehearsal(pool_of(80, replace(group(16, 2), counts_images=True), state(1, 2)))
    rehearsal.finish(with_image(3, 1, 1, 9, 130))
    assert rehearsal.check().index == ()


@pytest.mark.parametrize(
    "rows",
    [
        [[2, 3, 3], [4, 1, 1]],
        [[8, 3, 3]],
        [[2, 0, 3]],
        [[2, 3, 0]],
        [[-1, 2, 2]],
        [[5, 1, 1], [2, 1, 1]],
    ],
)
def test_images_that_overlap_lie_outside_or_are_empty_are_refused(rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="image at token"):
        facts_of(10, None, np.asarray(rows, np.int32))


def test_facts_know_what_has_begun_and_what_is_cut() -> None:
    facts = facts_of(10, 8, np.asarray([[2, 3, 7], [6, 1, 1]], np.int32))
    assert facts.images == (ImageSpan(2, 3, 7), ImageSpan(6, 1, 1))
    assert (facts.prompt_tokens, facts.images[0].end) == (8, 5)
    assert [len(list(facts.begun(n))) for n in (2, 3, 6, 7)] == [0, 1, 1, 2]
    assert [n for n in range(10) if cuts_image(facts, n)] == [3, 4]
