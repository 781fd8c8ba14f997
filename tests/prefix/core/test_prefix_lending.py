"""First tokens of a request that lie on another instance: what the core has of them, and gives."""

import pytest

from kvell.pages.layout import GroupKind, GroupSpec
from tests.pages.pools import group, images, pool_of, state
from tests.prefix.mixes import Prompt, with_images
from tests.prefix.rehearsal import Rehearsal
from tests.prefix.story import Story, ints

TEXT = list(range(100, 420))


def positions(story: Story, handle: int, group_index: int = 0) -> list[int]:
    return sorted(story.pages(handle, group_index))


def send(story: Story, handle: int, away_tokens: int) -> None:
    story.core.send_away(handle, away_tokens)
    story.check()


def named(story: Story) -> set[tuple[int, int]]:
    """(group, page) of all that the index names."""
    return {(entry.group, entry.page) for entry in story.check().index}


def evict_all(story: Story) -> None:
    story.core.close(story.core.open(ints([9_999]), "elsewhere", reuse=False))
    story.check()


@pytest.fixture
def story() -> Story:
    return Story(pool_of(8, group(4, 2)))


@pytest.mark.parametrize(
    "beside", [[], [group(4, 2, 9)], [state(1, 2)], [group(8, 1)], [group(4, 2, 9), state(2, 2)]]
)
def test_a_request_grows_far_beyond_the_pool(beside: list[GroupSpec]) -> None:
    """Four times the pages of the pool, a chunk at a time; the last ones stay here."""
    story = Story(pool_of(10, group(4, 2), *beside))
    tokens = [n % 7 for n in range(4 * 20 * 4)]
    handle, computed = story.open(tokens), 0
    while computed < len(tokens):
        story.next_step()
        computed = min(len(tokens), computed + 16)
        assert story.core.largest(handle, computed) == computed
        story.compute(handle, computed)
        send(story, handle, max(0, computed - 16) // 8 * 8)
    assert positions(story, handle) == list(range((len(tokens) - 16) // 4, len(tokens) // 4))
    story.close(handle)
    assert story.check().used == (0,) * 10


def test_without_lending_it_ends_where_the_pool_does(story: Story) -> None:
    handle = story.open(TEXT)
    assert story.core.largest(handle, len(TEXT)) == 64
    story.compute(handle, 64)
    assert story.core.largest(handle, len(TEXT)) == 64
    send(story, handle, 16)
    assert story.core.largest(handle, len(TEXT)) == 80


def test_what_is_away_counts_neither_at_the_peak_nor_for_others(story: Story) -> None:
    handle = story.open(TEXT[:48])
    story.compute(handle, 48)
    other = story.open(TEXT[100:140])
    assert not story.core.fits(other, 40, 40, ints([handle]), ints([48]))
    send(story, handle, 24)
    assert story.core.fits(other, 40, 40, ints([handle]), ints([48]))
    send(story, handle, 20)
    assert not story.core.fits(other, 40, 40, ints([handle]), ints([48]))
    assert story.core.fits(other, 36, 36, ints([handle]), ints([48]))


def test_a_refusal_is_asked_again_when_somebody_lends(story: Story) -> None:
    """Pages that others share are not freed, and yet their holder wants less from then on."""
    first = story.open(TEXT[:32])
    story.compute(first, 32)
    second = story.open([*TEXT[:32], 1])
    story.compute(second, 33)
    send(story, second, 32)
    send(story, second, 0)
    waiting = story.core.open(ints(range(28)), "")
    others, lengths = ints([first, second]), ints([32, 33])
    assert not story.core.fits(waiting, 28, 28, others, lengths)
    story.core.close(waiting, renew=False)
    send(story, second, 32)
    assert story.core.may_fit()
    waiting = story.core.open(ints(range(28)), "")
    assert story.core.fits(waiting, 28, 28, others, lengths)


def test_pages_that_went_away_are_hit_while_they_are_cached(story: Story) -> None:
    handle = story.open(TEXT[:33])
    story.compute(handle, 33)
    send(story, handle, 16)
    assert positions(story, handle) == [4, 5, 6, 7, 8]
    assert sum(story.check().cached) == 4
    other = story.open([*TEXT[:32], 1])
    assert story.core.hit_tokens(other) == 32
    assert set(positions(story, other)) == set(range(8))


def test_they_are_evicted_first_and_then_no_hit_claims_them(story: Story) -> None:
    """Before what a request left that ended long ago, which lies in a large page of its own."""
    story.serve([1] * 8)
    story.next_step()
    handle = story.open(TEXT[:33])
    story.compute(handle, 33)
    send(story, handle, 16)
    assert story.peek([*TEXT[:33], 1]) == 32
    story.next_step()
    other = story.open([2] * 16, expected=16)
    story.compute(other, 16)
    assert story.peek([1] * 9) == 8
    assert story.peek([*TEXT[:33], 1]) == 32
    third = story.open([3] * 8)
    story.compute(third, 8)
    assert story.peek([1] * 9) == 8
    hit = story.peek([*TEXT[:33], 1])
    assert hit < 16
    newcomer = story.open([*TEXT[:33], 1])
    assert story.core.hit_tokens(newcomer) == hit


def test_what_is_closed_while_a_part_is_away_is_no_hit_without_it(story: Story) -> None:
    handle = story.open(TEXT[:34])
    story.compute(handle, 34)
    send(story, handle, 8)
    evict_all(story)
    story.close(handle)
    assert [row[1] for row in story.core.known(ints(TEXT[:34]), "").tolist()] == [
        2,
        3,
        4,
        5,
        6,
        7,
        8,
    ]
    assert story.peek(TEXT[:40]) == 0
    story.serve(TEXT[:9])
    assert story.peek(TEXT[:40]) == 34


@pytest.mark.parametrize("returns", [True, False])
def test_a_close_while_all_is_away(story: Story, returns: bool) -> None:
    handle = story.open(TEXT[:32])
    story.compute(handle, 32)
    send(story, handle, 32)
    assert positions(story, handle) == []
    story.core.close(handle, returns=returns)
    assert story.peek(TEXT[:40]) == 32
    evict_all(story)
    assert story.peek(TEXT[:40]) == 0


def test_what_comes_home_gets_empty_pages_with_the_next_growth(story: Story) -> None:
    handle = story.open(TEXT[:40])
    story.compute(handle, 34)
    send(story, handle, 24)
    evict_all(story)
    send(story, handle, 8)
    assert positions(story, handle) == [6, 7, 8]
    rows = story.grow(handle, 37)
    assert [position for _, _, position, _ in rows] == [2, 3, 4, 5, 9]
    assert positions(story, handle) == list(range(2, 10))
    assert story.pages(handle, 0) | {p: page for _, _, p, page in rows} == story.pages(handle, 0)
    assert story.grow(handle, 37) == []


def test_it_is_given_though_nothing_else_is_computed(story: Story) -> None:
    handle = story.open(TEXT[:40])
    story.compute(handle, 33)
    send(story, handle, 16)
    send(story, handle, 0)
    assert [row[2] for row in story.grow(handle, 33)] == [0, 1, 2, 3]


def test_it_is_named_where_the_index_has_a_hole(story: Story) -> None:
    handle = story.open(TEXT[:40])
    story.compute(handle, 34)
    send(story, handle, 16)
    evict_all(story)
    assert story.peek(TEXT[:40]) == 0
    send(story, handle, 0)
    rows = story.grow(handle, 35)
    pages = {(0, page) for _, _, _, page in rows}
    assert not pages & named(story), "nobody has filled them"
    assert story.peek(TEXT[:40]) == 0
    story.core.advance(ints([handle]), ints([35]))
    assert pages <= named(story)
    assert story.peek(TEXT[:40]) == 32


def test_pages_of_others_stay_named_and_those_that_came_home_private(story: Story) -> None:
    handle = story.open(TEXT[:40])
    story.compute(handle, 34)
    send(story, handle, 16)
    before = named(story)
    send(story, handle, 8)
    rows = story.grow(handle, 35)
    story.core.advance(ints([handle]), ints([35]))
    assert named(story) == before
    story.close(handle)
    assert not {(0, page) for _, _, _, page in rows} & set(named(story))
    assert story.peek(TEXT[:40]) == 35


def test_a_close_before_they_are_filled_names_nothing(story: Story) -> None:
    handle = story.open(TEXT[:40])
    story.compute(handle, 34)
    send(story, handle, 16)
    evict_all(story)
    send(story, handle, 0)
    story.grow(handle, 35)
    story.close(handle)
    assert story.peek(TEXT[:40]) == 0


def test_it_waits_for_room(story: Story) -> None:
    handle = story.open(TEXT)
    story.compute(handle, 64)
    send(story, handle, 32)
    other = story.open([1] * 20)
    story.compute(other, 20)
    send(story, handle, 0)
    assert story.core.grow(ints([handle]), ints([64]))[0] == 0
    assert story.core.largest(handle, 80) == 64
    send(story, handle, 24)
    assert [row[2] for row in story.grow(handle, 64)] == [6, 7]


def test_a_step_beyond_missing_pages_is_a_slip() -> None:
    story = Story(pool_of(8, group(4, 2)))
    handle = story.open(TEXT[:40])
    story.grow(handle, 39)
    story.core.advance(ints([handle]), ints([34]))
    send(story, handle, 16)
    send(story, handle, 8)
    if type(story.core).__name__ == "CompiledCore":
        with pytest.raises(ValueError, match="beyond the pages held"):
            story.core.advance(ints([handle]), ints([35]))
        with pytest.raises(ValueError, match="fewer tokens computed"):
            story.core.advance(ints([handle]), ints([7]))
    assert [row[2] for row in story.grow(handle, 35)] == [2, 3]
    story.core.advance(ints([handle]), ints([35]))
    story.check()


def test_contents_are_right_whoever_has_them() -> None:
    """What is read here is what was written, and what came home what had been there."""
    there = Rehearsal(pool_of(12, group(4, 2), group(2, 3, 7), state(1, 2)))
    request = there.serve(Prompt(TEXT[:60], with_images([1], [], 0).images), 30)
    for whole, until in [(5, 34), (8, 38), (2, 39), (2, 41), (0, 50), (12, 57), (11, 60)]:
        there.send_away(request, whole)
        there.reach(request, until)
    there.close(request, renew=True)
    assert there.peek(Prompt(TEXT[:70], request.prompt.images)) in (0, 60)


def test_only_full_attention_lies_elsewhere() -> None:
    """Windows and states stay; the units are pages of every group of full attention."""
    story = Story(pool_of(30, group(4, 2), group(8, 1), group(4, 2, 12), state(2, 2)))
    handle = story.open(TEXT[:40])
    story.compute(handle, 40)
    before = [positions(story, handle, index) for index in (2, 3)]
    send(story, handle, 24)
    assert positions(story, handle, 0) == list(range(6, 10))
    assert positions(story, handle, 1) == [3, 4]
    assert [positions(story, handle, index) for index in (2, 3)] == before
    with pytest.raises(ValueError, match="28 tokens end inside a page"):
        story.core.send_away(handle, 28)


def test_images_beside_the_text_stay() -> None:
    story = Story(pool_of(30, group(4, 2), images(GroupKind.CROSS, 4, 2)))
    prompt = with_images(TEXT[:40], [3, 20], 3)
    handle = story.core.open(ints(prompt.tokens), "", images=prompt.images)
    story.core.claim(handle, 40)
    story.compute(handle, 40)
    before = positions(story, handle, 1)
    send(story, handle, 36)
    assert positions(story, handle, 0) == [9]
    assert positions(story, handle, 1) == before != []


def test_a_request_that_moves_here_leaves_its_first_tokens_there(story: Story) -> None:
    """It gets pages only for what it has here: it may be longer than the pool."""
    tokens = TEXT[:200]
    handle = story.core.open(ints(tokens), "")
    story.core.receive(handle, 199)
    send(story, handle, 180)
    story.core.claim(handle, 220)
    rows = story.compute(handle, 200)
    assert [position for _, _, position, _ in rows] == [45, 46, 47, 48, 49]
    send(story, handle, 172)
    assert [row[2] for row in story.grow(handle, 200)] == [43, 44]


def test_gathered_pages_keep_their_positions() -> None:
    """Compaction counts from the first page that is here."""
    story = Story(pool_of(16, group(1, 4)))
    handles = [story.open([n]) for n in range(4)]
    story.core.grow(ints(handles), ints([1] * 4))
    story.core.advance(ints(handles), ints([1] * 4))
    for token in range(11):
        for handle in handles:
            story.decode(handle, token)
    send(story, handles[0], 4)
    send(story, handles[0], 2)
    story.grow(handles[0], 12)
    for handle in handles[1:]:
        story.core.close(handle, renew=False)
    before = story.pages(handles[0], 0)
    moved = story.core.compact(2).tolist()
    story.check()
    assert moved
    after = {position: page for _, _, position, page in moved}
    assert story.pages(handles[0], 0) == before | after
