"""What requests find of each other: hits, windows left behind, salts, leases, splits."""

import numpy as np
import pytest

from tests.pages.pools import group, pool_of
from tests.prefix.story import Story, ints

PROMPT = list(range(100, 140))
"""Forty tokens: ten pages of four."""


def roomy() -> Story:
    return Story(pool_of(60, group(4, 2), group(4, 3, window=9)))


def test_the_second_request_hits() -> None:
    """Not the third: pages behind the window are still there."""
    story = roomy()
    assert story.serve(PROMPT) == 0
    assert story.serve([*PROMPT[:24], 1, 2, 3]) == 24
    assert story.serve([*PROMPT[:11], 1]) == 11, "the page it shares in part is copied"


def test_hits_are_counted_by_what_each_group_took() -> None:
    """24 tokens of full attention; the window of 9 reads tokens 16 … 23."""
    story = roomy()
    story.serve(PROMPT)
    story.serve([*PROMPT[:24], 1, 2, 3])
    totals = story.core.totals()
    assert (totals.hit_tokens, totals.group_hit_tokens) == (24, (24, 8))


def test_a_lease_that_nobody_claims_is_no_hit() -> None:
    story = roomy()
    story.serve(PROMPT)
    story.core.open(ints(PROMPT), "", story.step)
    story.next_step()
    assert story.core.totals().group_hit_tokens == (0, 0)


def test_at_least_the_last_token_is_left_to_compute() -> None:
    story = roomy()
    story.serve(PROMPT)
    assert story.serve(PROMPT) == 39
    assert story.serve(PROMPT[:4]) == 3
    assert story.serve(PROMPT[:1]) == 0
    assert story.serve([*PROMPT, 7]) == 40


def test_a_request_hits_what_another_still_uses() -> None:
    story = roomy()
    story.next_step()
    first = story.open(PROMPT)
    story.compute(first, 18)
    second = story.open(PROMPT)
    assert story.core.hit_tokens(second) == 16
    assert story.pages(second, 0) == {p: story.pages(first, 0)[p] for p in range(4)}
    assert set(story.pages(second, 1)) == {2, 3}, "a window of 9 reads tokens 8 … 15"
    story.close(first)
    story.close(second)


def test_what_is_being_computed_is_not_hit_before_it_is() -> None:
    story = roomy()
    first = story.open(PROMPT)
    story.grow(first, 40)
    assert story.peek(PROMPT) == 0


def test_the_next_turn_hits_generated_tokens() -> None:
    story = roomy()
    story.next_step()
    turn = story.open(PROMPT[:6], expected=12)
    story.compute(turn, 6)
    for token in (7, 8, 9, 10, 11, 12, 13):
        story.decode(turn, token)
    story.close(turn)
    conversation = [*PROMPT[:6], 7, 8, 9, 10, 11, 12, 13]
    assert story.serve([*conversation, 50, 51]) == 13, "the last page too, which is not full"
    assert story.serve([*PROMPT[:6], 7, 8, 0]) == 8


def test_windows_left_behind_go_first_when_memory_is_not_idle() -> None:
    """Both groups take a large page for each page here, and the pool is all in use."""
    story = Story(pool_of(14, group(4, 1), group(4, 1, window=5)))
    story.serve(PROMPT[:24])
    old = story.check()
    assert sum(old.cached) == 12
    other = story.open([9] * 12)
    story.compute(other, 12)
    state = story.check()
    assert state.evicted_pages == (0, 4), "four pages went, all behind the window"
    assert story.peek([*PROMPT[:24], 0]) == 24, "the whole prefix can still be resumed"
    assert story.peek([*PROMPT[:20], 0]) == 20, "and what its last token still read"
    assert story.peek([*PROMPT[:16], 0]) == 0, "of its middle nothing can"


def test_among_what_can_be_resumed_the_least_recently_used_goes_first() -> None:
    story = Story(pool_of(6, group(4, 1)))
    story.serve(PROMPT[:8])
    story.serve([1] * 8)
    story.serve([*PROMPT[:8], 5])
    story.serve([2] * 16)
    assert story.peek([*PROMPT[:8], 0]) == 8
    assert story.peek([1] * 9) == 0


def test_of_one_age_the_end_goes_before_the_beginning() -> None:
    story = Story(pool_of(6, group(4, 1)))
    story.serve(PROMPT[:16])
    story.serve([1] * 16)
    assert [story.peek([*PROMPT[:n], 0]) for n in (8, 12)] == [8, 8]


def test_salts_never_share() -> None:
    story = roomy()
    story.serve(PROMPT, root="mine")
    assert story.peek(PROMPT, "yours") == 0
    assert story.peek(PROMPT) == 0
    assert story.serve(PROMPT, root="mine") == 39


def test_a_lease_holds_pages_until_it_expires() -> None:
    story = Story(pool_of(3, group(4, 1)))
    story.serve(PROMPT[:8])
    lease = story.core.open(ints([*PROMPT[:8], 0]), "", story.step + 2)
    assert story.check().holders[0].is_lease
    story.next_step(2)
    assert story.core.hit_tokens(lease) == 8
    busy = story.open([1] * 12)
    assert story.core.largest(busy, 12) == 4, "leased pages are not evicted"
    story.next_step()
    assert [h.handle for h in story.check().holders] == [busy]
    assert story.core.largest(busy, 12) == 12


def test_a_claimed_lease_is_a_request_and_does_not_expire() -> None:
    story = Story(pool_of(3, group(4, 1)))
    story.serve(PROMPT[:8])
    before = story.check().hit_tokens
    lease = story.core.open(ints([*PROMPT[:8], 0]), "", story.step)
    assert story.check().hit_tokens == before, "a lease is no hit yet"
    story.core.claim(lease, 9)
    assert story.check().hit_tokens == before + 8
    story.next_step(5)
    assert not story.check().holders[0].is_lease


def test_an_expired_lease_renews_nothing() -> None:
    story = Story(pool_of(4, group(4, 1)))
    story.serve(PROMPT[:8])
    story.serve([1] * 8)
    story.core.open(ints([*PROMPT[:8], 0]), "", story.step)
    story.next_step()
    story.serve([2] * 4)
    assert story.peek([*PROMPT[:8], 0]) == 4, "still the oldest"
    assert story.peek([1] * 9) == 8


def test_closing_without_renewal_keeps_the_place_in_the_order() -> None:
    story = Story(pool_of(4, group(4, 1)))
    story.serve(PROMPT[:8])
    story.serve([1] * 8)
    story.next_step()
    story.core.close(story.open([*PROMPT[:8], 0]), renew=False)
    story.serve([2] * 4)
    assert story.peek([*PROMPT[:8], 0]) == 4


def test_a_page_that_straddles_a_split_is_copied_and_both_branches_have_one() -> None:
    story = roomy()
    left, right = [*PROMPT[:6], 1, 1, 1], [*PROMPT[:6], 2, 2, 2]
    story.serve(left)
    assert story.serve(right) == 6
    assert story.peek(left) == 8
    assert story.peek(right) == 8


def test_two_who_computed_the_same_keep_one_copy() -> None:
    story = roomy()
    story.next_step()
    twins = [story.open(PROMPT[:9]) for _ in range(2)]
    for twin in twins:
        story.compute(twin, 9)
    for twin in twins:
        story.close(twin)
    state = story.check()
    assert [len(keys) for keys in state.keys] == [3, 3]
    assert sum(state.cached) == 6, "the second copy was not kept"


@pytest.mark.parametrize("bad", [-1, 0])
def test_time_does_not_go_back(bad: int) -> None:
    story = Story(pool_of(2, group(4, 1)))
    story.next_step(3)
    with pytest.raises(ValueError, match="steps"):
        story.core.begin_step(2 + bad)


def test_prompts_are_copied() -> None:
    story = roomy()
    prompt = np.asarray(PROMPT, np.int32)
    handle = story.core.open(prompt, "")
    story.core.claim(handle, 40)
    prompt[:] = 0
    story.core.grow(ints([handle]), ints([40]))
    story.core.advance(ints([handle]), ints([40]))
    assert story.peek([*PROMPT, 1]) == 40
    assert story.peek([0] * 41) == 0
