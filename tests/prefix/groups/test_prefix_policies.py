"""What groups of each kind keep, and where they can resume (Jenga fig. 9 and 11)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.layout import GroupKind
from kvell.prefix.groups.policies import (
    ChunkedPolicy,
    GroupPolicy,
    SlidingPolicy,
    StatePolicy,
    policy_of,
)
from tests.oracle.index.possible import possible_prefixes
from tests.pages.pools import Chunk, group, images

lengths = st.integers(0, 60)
windows = st.integers(1, 20)


def cached(tokens: str) -> list[bool]:
    return [letter in tokens for letter in "ABCDEFGHIJ"]


def test_jenga_fig_11_full_attention_needs_all_a_window_its_last_tokens() -> None:
    """The paper counts earlier tokens as its window: its 2 is our 3."""
    full = possible_prefixes(GroupPolicy(), cached("ABCDEFGHI"))
    sliding = possible_prefixes(SlidingPolicy(3), cached("CDHIJ"))
    assert full == list(range(1, 10))
    assert sliding == [4, 9, 10]
    assert sorted(set(full) & set(sliding)) == [4, 9]


def test_a_short_prefix_needs_no_more_than_itself() -> None:
    assert possible_prefixes(SlidingPolicy(3), cached("ABJ")) == [1, 2]


def test_a_window_of_one_resumes_anywhere() -> None:
    assert possible_prefixes(SlidingPolicy(1), cached("")) == list(range(1, 11))


@given(st.lists(st.booleans(), max_size=30), windows)
def test_a_prefix_is_possible_when_everything_its_next_token_reads_is_cached(
    hits: list[bool], window: int
) -> None:
    for policy in (GroupPolicy(), SlidingPolicy(window), ChunkedPolicy(window)):
        assert possible_prefixes(policy, hits) == [
            length
            for length in range(1, len(hits) + 1)
            if all(hits[policy.active_start(length) : length])
        ]


@given(lengths, windows)
def test_a_window_keeps_what_the_next_token_reads(length: int, window: int) -> None:
    policy = SlidingPolicy(window)
    assert policy.active_start(length) == max(0, length + 1 - window)
    assert policy.live_tokens(length) == length - policy.active_start(length)


@given(lengths, windows)
def test_a_window_stays_in_use_as_the_last_token_read_it(length: int, window: int) -> None:
    """One token more than the next one reads, so its access is now (Jenga fig. 10)."""
    policy = SlidingPolicy(window)
    assert policy.kept_start(length + 1) == policy.active_start(length)


def test_a_state_can_be_resumed_where_it_was_kept_and_is_never_behind() -> None:
    policy = StatePolicy()
    assert possible_prefixes(policy, cached("BF")) == [2, 6]
    assert [policy.kept_start(n) for n in (0, 7)] == [0, 0]
    assert [policy.live_tokens(n) for n in (0, 1, 70)] == [0, 1, 1]


def test_every_kind_says_what_is_required() -> None:
    kinds = {kind: policy_of(images(kind, 4, 2)) for kind in GroupKind}
    assert [kind for kind, policy in kinds.items() if not policy.required_for_hit] == [
        GroupKind.VISION
    ]
    assert not policy_of(replace(group(4, 2, 9), required_for_hit=False)).required_for_hit


@given(lengths)
def test_full_attention_leaves_nothing_behind(length: int) -> None:
    assert GroupPolicy().active_start(length) == 0
    assert GroupPolicy().live_tokens(length) == length


@given(lengths, windows)
def test_a_window_longer_than_the_text_is_full_attention(length: int, extra: int) -> None:
    policy = SlidingPolicy(length + extra)
    assert policy.live_tokens(length) == length
    assert policy.active_start(length) == 0


@given(lengths, windows)
def test_a_chunk_keeps_what_the_next_token_reads(length: int, chunk: int) -> None:
    """Of the tokens before it: those in the same chunk."""
    policy = ChunkedPolicy(chunk)
    read = [token for token in range(length) if token // chunk == length // chunk]
    assert policy.live_tokens(length) == len(read)
    assert policy.active_start(length) == length - len(read)


@pytest.mark.parametrize("policy", [GroupPolicy(), SlidingPolicy(5), ChunkedPolicy(5)])
@given(length=lengths)
def test_the_most_kept_is_the_most_on_the_way(policy: GroupPolicy, length: int) -> None:
    """What the last token read counts too: it is given back a token later."""
    on_the_way = max(n - policy.kept_start(n) for n in range(length + 1))
    assert policy.most_kept_tokens(length) == on_the_way


def test_chunks_of_four_resume_where_one_ended_and_where_they_are_whole_so_far() -> None:
    policy = ChunkedPolicy(4)
    assert possible_prefixes(policy, cached("")) == [4, 8]
    assert possible_prefixes(policy, cached("ABFGHI")) == [1, 2, 4, 8, 9]


@pytest.mark.parametrize("policy", [GroupPolicy(), SlidingPolicy(7), ChunkedPolicy(7)])
def test_all_kinds_of_tokens_are_required(policy: GroupPolicy) -> None:
    assert policy.required_for_hit


def test_a_groups_kind_chooses_its_policy() -> None:
    assert policy_of(group(4, 2)) == GroupPolicy()
    sliding = group(4, 2, window=9)
    assert sliding.kind is GroupKind.SLIDING
    assert policy_of(sliding) == SlidingPolicy(9)
    assert policy_of(group(4, 2, window=Chunk(9))) == ChunkedPolicy(9)
