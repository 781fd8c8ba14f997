"""Waypoints: where long prompts are resumed that part from an earlier one in its midst."""

from dataclasses import replace

import pytest

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.prefix.groups.needs import alignment_tokens
from tests.oracle.eviction.checkpoints import (
    Sort,
    cuts,
    waypoint_tokens,
    waypoints,
    waypoints_overlap,
)
from tests.oracle.eviction.evictor import NORMAL
from tests.pages.pools import Chunk, group, pool_of, state
from tests.prefix.mixes import text
from tests.prefix.rehearsal import Rehearsal

TOKEN_BYTES = 100


def nearest(*others: GroupSpec, full: int = 1, prompt_tokens: int = 20_000) -> int:
    """Waypoints of a model with so many full groups of 100 bytes a token."""
    groups = [replace(group(16, 1), page_stride_bytes=16 * TOKEN_BYTES)] * full + list(others)
    return waypoint_tokens(groups, alignment_tokens(groups), prompt_tokens)


def state_of(tokens: int) -> GroupSpec:
    """As large as so many tokens of full attention, in two slices."""
    return replace(state(2, 1), page_stride_bytes=tokens * TOKEN_BYTES // 2)


def window_of(tokens: int, times: int = 1) -> GroupSpec:
    """A sliding window whose tokens are so many times as large."""
    return replace(group(16, 1, tokens), page_stride_bytes=16 * TOKEN_BYTES * times)


def test_distances_from_the_prompts_end_double() -> None:
    assert waypoints(20_000, 16, 2_048) == [17_920, 15_872, 11_776, 3_584]
    assert waypoints(20_000, 16, 8_192) == [11_776]
    assert waypoints(20_000, 16, 0) == []


def test_none_is_nearer_to_the_start_than_to_the_end() -> None:
    assert waypoints(4_095, 16, 2_048) == []
    assert waypoints(4_096, 16, 2_048) == [2_048]
    assert waypoints(60, 16, 2_048) == []


@pytest.mark.parametrize("parted", range(2_048, 100_000, 3_333))
def test_whoever_parts_in_the_midst_finds_all_but_as_much_as_follows(parted: int) -> None:
    """What is lost is less than what the earlier prompt had beyond the parting, rounded up."""
    end = 100_000 // 512 * 512
    found = max((way for way in [end, *waypoints(100_000, 16, 2_048)] if way <= parted), default=0)
    assert parted - found <= max(2_048, end - parted)


def test_they_lie_where_pages_end() -> None:
    assert waypoints(9_000, 48, 2_048) == [6_144, 4_080]
    assert all(way % 48 == 0 for way in waypoints(90_000, 48, 2_048))


def test_they_are_cuts_but_never_instead_of_the_prompts_end() -> None:
    found = dict(cuts(0, 9_000, 9_000, 0, 16, 2_048))
    assert [cut for cut, sort in found.items() if sort is Sort.WAYPOINT] == [4_608, 6_656]
    assert found[8_704] is Sort.PROMPT_END
    assert dict(cuts(0, 9_000, 9_000, 6_660, 16, 2_048))[6_656] is Sort.BRANCH


def test_a_waypoint_takes_at_most_a_fourth_of_the_tokens_it_stands_for() -> None:
    found = {tokens: nearest(state_of(tokens)) for tokens in (100, 512, 514, 2_048, 4_096, 4_098)}
    assert found == {100: 2_048, 512: 2_048, 514: 4_096, 2_048: 8_192, 4_096: 16_384, 4_098: 0}


def test_or_of_what_is_kept_at_the_prompts_end() -> None:
    """Sliding windows of neighbours overlap."""
    assert nearest(window_of(512)) == 2_048
    assert nearest(window_of(1_024, 5)) == 0
    assert nearest(window_of(8_192, 3)) == 2_048


def test_dear_ones_are_for_prompts_that_take_ten_times_as_much() -> None:
    """States of 5,000 tokens, windows of 1,024 tokens five times as large as those of attention."""
    for dear, tokens in ((state_of(5_000), 50_000), (window_of(1_024, 5), 51_200)):
        assert nearest(dear, prompt_tokens=tokens - 1) == 0
        assert nearest(dear, prompt_tokens=tokens) == 8_192
    assert nearest(full=0, prompt_tokens=1 << 20) == 0


@pytest.mark.parametrize(
    ("own", "overlap"),
    [
        (window_of(512), False),
        (window_of(2_048), False),
        (window_of(8_192, 3), True),
        (window_of(1_024, 5), False),
        (state_of(512), False),
        (state_of(5_000), False),
    ],
)
def test_windows_overlap_where_one_takes_more_than_a_fourth_of_its_tokens(
    own: GroupSpec, *, overlap: bool
) -> None:
    groups = [replace(group(16, 1), page_stride_bytes=16 * TOKEN_BYTES), own]
    alignment = alignment_tokens(groups)
    tokens = waypoint_tokens(groups, alignment, 90_000)
    assert tokens > 0
    assert waypoints_overlap(groups, alignment, tokens) is overlap
    assert not waypoints_overlap(groups, alignment, 0)


def test_a_chunk_counts_whole() -> None:
    chunk = replace(group(16, 1, Chunk(8_192)), page_stride_bytes=16 * TOKEN_BYTES * 3)
    assert chunk.kind is GroupKind.CHUNKED
    assert nearest(chunk) == 0


def test_attention_alone_needs_none_and_states_alone_have_none() -> None:
    assert nearest() == 0
    assert nearest(state_of(100), full=0) == 0


@pytest.mark.parametrize("own", [state(1, 16), group(16, 16, 64)])
def test_a_prompt_that_parts_in_the_midst_resumes_at_the_waypoint_before(own: GroupSpec) -> None:
    rehearsal = Rehearsal(pool_of(40, group(16, 16), own))
    first = text(*range(5_000))
    assert rehearsal.finish(first) == 0
    kept = rehearsal.check()
    ends = {e.end for e in kept.index if e.group == 1 and kept.keys[1][e.page][0] == NORMAL}
    assert 2_560 in ends
    parted = text(*range(4_000), 7, 7)
    assert rehearsal.peek(parted) >= 2_560


@pytest.mark.parametrize(("window", "way", "waits"), [(256, 17_920, True), (8_192, 11_776, False)])
def test_prompt_ends_outlive_waypoints_that_overlap(window: int, way: int, *, waits: bool) -> None:
    """While the request runs its prompt's end counts as accessed when it is expected to end;
    what is kept on the way so only where that is little."""
    rehearsal = Rehearsal(pool_of(220, group(16, 12), group(16, 12, window)))
    rehearsal.next_step()
    request = rehearsal.open(text(*range(20_000)), "", "", extra=100)
    rehearsal.reach(request, 20_000)
    kept = rehearsal.check()
    ages = {e.end: kept.keys[1][e.page][:2] for e in kept.index if e.group == 1}

    def kept_for(length: int, last: int) -> set[tuple[int, int]]:
        first = (length - (window - 1)) // 16 * 16 + 16
        return {age for at, age in ages.items() if first <= at <= last}

    expected = rehearsal.step + 100
    assert kept_for(19_968, (20_000 - window) // 16 * 16) == {(NORMAL, expected)}
    assert kept_for(way, way) == {(NORMAL, expected if waits else rehearsal.step)}
