"""The longest common resumable prefix, beside the paper's own wording of the question."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.layout import GroupSpec
from kvell.prefix.hits import alignment_tokens, hit_positions, longest_hit
from kvell.prefix.policies import ChunkedPolicy, FullPolicy, SlidingPolicy, policy_of
from tests.pages.pools import Chunk, group

reaches = st.sampled_from([0, 1, 2, 3, 6, 11, Chunk(1), Chunk(4), Chunk(7), Chunk(12)])
specs = st.lists(
    st.builds(group, st.integers(1, 4), st.just(2), reaches),
    min_size=1,
    max_size=3,
)


def by_intersection(groups: list[GroupSpec], found: list[dict[int, int]], limit: int) -> int:
    """get_possible_prefix of every group over tokens, intersected (Jenga §5.2)."""
    lengths = set(range(0, limit + 1, alignment_tokens(groups)))
    for spec, pages in zip(groups, found, strict=True):
        hits = [token // spec.page_tokens in pages for token in range(limit)]
        lengths &= {0, *policy_of(spec).possible_prefixes(hits)}
    return max(lengths)


@given(specs, st.data(), st.integers(0, 40))
def test_the_longest_hit_is_that_of_the_paper(
    groups: list[GroupSpec], data: st.DataObject, limit: int
) -> None:
    found = [
        dict.fromkeys(data.draw(st.sets(st.integers(0, 40 // g.page_tokens), max_size=40)), 0)
        for g in groups
    ]
    policies = [policy_of(g) for g in groups]
    said = longest_hit(groups, policies, found, limit)
    assert said == by_intersection(groups, found, limit)


def test_hits_end_on_whole_pages_of_every_group() -> None:
    groups = [group(4, 2), group(6, 2)]
    assert alignment_tokens(groups) == 12
    found = [dict.fromkeys(range(9), 0), dict.fromkeys(range(6), 0)]
    assert longest_hit(groups, [FullPolicy(), FullPolicy()], found, 35) == 24


def test_a_hole_ends_full_attention_but_not_a_window_behind_it() -> None:
    holed = {0: 1, 2: 3, 3: 4}
    assert longest_hit([group(4, 2)], [FullPolicy()], [holed], 16) == 4
    assert longest_hit([group(4, 2, 9)], [SlidingPolicy(9)], [holed], 16) == 16


def test_one_group_alone_cannot_hit() -> None:
    groups = [group(4, 2), group(4, 2, 9)]
    policies = [policy_of(g) for g in groups]
    assert longest_hit(groups, policies, [{0: 0, 1: 1}, {}], 8) == 0


def test_a_group_that_is_not_required_does_not_shorten_the_hit() -> None:
    policies = [FullPolicy(), FullPolicy(required_for_hit=False)]
    assert longest_hit([group(4, 2)] * 2, policies, [{0: 0, 1: 1}, {}], 8) == 8


def test_positions_to_hold_are_those_the_next_token_reads() -> None:
    assert hit_positions(group(4, 2), FullPolicy(), 12) == range(3)
    assert hit_positions(group(4, 2, 6), SlidingPolicy(6), 12) == range(1, 3)
    assert hit_positions(group(4, 2, 1), SlidingPolicy(1), 12) == range(3, 3)
    assert hit_positions(group(4, 2, Chunk(8)), ChunkedPolicy(8), 12) == range(2, 3)
    assert hit_positions(group(4, 2, Chunk(6)), ChunkedPolicy(6), 12) == range(3, 3)


def test_a_chunk_that_ended_needs_nothing_to_resume() -> None:
    spec, policy = group(4, 2, Chunk(8)), ChunkedPolicy(8)
    assert longest_hit([spec], [policy], [{}], 11) == 8
    assert longest_hit([spec], [policy], [{2: 5}], 12) == 12
    assert longest_hit([spec], [policy], [{0: 5, 1: 6}], 12) == 8
