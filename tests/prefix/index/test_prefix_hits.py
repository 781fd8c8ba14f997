"""The longest common resumable prefix, beside the paper's own wording of the question."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.prefix.groups.facts import Facts, ImageSpan
from kvell.prefix.groups.needs import alignment_tokens, resumed_from
from kvell.prefix.groups.policies import SlidingPolicy, policy_of
from tests.oracle.index.hits import Found, image_places, longest_hit, tail_page
from tests.oracle.index.possible import possible_prefixes
from tests.pages.pools import Chunk, dropping, group, images, state

TEXT = Facts(1000)
reaches = st.sampled_from([0, 1, 2, 3, 6, 11, Chunk(1), Chunk(4), Chunk(7), Chunk(12)])
specs = st.lists(
    st.builds(group, st.integers(1, 4), st.just(2), reaches),
    min_size=1,
    max_size=3,
)


def hit(groups: list[GroupSpec], found: list[Found], limit: int, facts: Facts = TEXT) -> int:
    return longest_hit(groups, [policy_of(g) for g in groups], found, limit, facts)


def whole(spec: GroupSpec, *positions: int) -> Found:
    """Whole pages at these positions."""
    return {((position + 1) * spec.page_tokens, 0): 9 for position in positions}


def by_intersection(groups: list[GroupSpec], found: list[Found], limit: int) -> set[int]:
    """get_possible_prefix of every group over tokens, intersected (Jenga §5.2)."""
    lengths = set(range(limit + 1))
    for spec, pages in zip(groups, found, strict=True):
        size = spec.page_tokens
        hits = [((token // size + 1) * size, 0) in pages for token in range(limit)]
        lengths &= {0, *possible_prefixes(policy_of(spec), hits)}
    return lengths


@given(specs, st.data(), st.integers(0, 40))
def test_the_hit_is_one_of_the_papers_and_no_longer_one_ends_with_whole_pages(
    groups: list[GroupSpec], data: st.DataObject, limit: int
) -> None:
    found = [
        whole(g, *data.draw(st.sets(st.integers(0, 40 // g.page_tokens), max_size=40)))
        for g in groups
    ]
    possible = by_intersection(groups, found, limit)
    aligned = possible & set(range(0, limit + 1, alignment_tokens(groups)))
    said = hit(groups, found, limit)
    assert said in possible
    assert said >= max(aligned)


def test_hits_end_on_whole_pages_of_every_group() -> None:
    groups = [group(4, 2), group(6, 2)]
    assert alignment_tokens(groups) == 12
    found = [whole(groups[0], *range(9)), whole(groups[1], *range(6))]
    assert hit(groups, found, 35) == 35, "and where the text ends, if all pages are there"
    assert hit(groups, found, 45) == 36
    assert hit(groups, [found[0], whole(groups[1], 0, 1, 2)], 21) == 18


def test_a_hole_ends_full_attention_but_not_a_window_behind_it() -> None:
    full, sliding = group(4, 2), group(4, 2, 9)
    holed = whole(full, 0, 2, 3)
    assert hit([full], [holed], 16) == 4
    assert hit([sliding], [holed], 16) == 16


def test_one_group_alone_cannot_hit() -> None:
    groups = [group(4, 2), group(4, 2, 9)]
    assert hit(groups, [whole(groups[0], 0, 1), {}], 8) == 0


def test_a_group_that_is_not_required_does_not_shorten_the_hit() -> None:
    full = group(4, 2)
    policies = [policy_of(full), SlidingPolicy(5, required_for_hit=False)]
    assert longest_hit([full] * 2, policies, [whole(full, 0, 1), {}], 8, TEXT) == 8


def test_a_request_that_ended_inside_a_page_is_hit_where_it_ended() -> None:
    full = group(4, 2)
    found = {**whole(full, 0), (6, 0): 5}
    assert hit([full], [found], 7) == 6
    assert hit([full], [found], 9) == 6
    assert hit([full], [found], 5) == 5, "the first token of its last page is copied"
    assert tail_page(full, found, 6) == 5
    assert tail_page(full, found, 5) == 5, "it begins as a page of 5 would"
    assert tail_page(full, found, 7) is None


def test_every_group_must_have_what_the_last_page_begins_with() -> None:
    small, large = group(2, 2), group(4, 2)
    ended = {**whole(large, 0), (6, 0): 5}
    assert hit([small, large], [whole(small, 0, 1, 2), ended], 9) == 6
    assert hit([small, large], [whole(small, 0, 1), ended], 9) == 4


def test_a_whole_page_serves_as_the_tail_of_a_shorter_prefix() -> None:
    """One group says that a request ended at 6; the other has the page of tokens 4 … 7."""
    first, second = group(4, 2), group(4, 3)
    ended = {**whole(first, 0), (6, 0): 5}
    assert hit([first, second], [ended, whole(second, 0, 1)], 9) == 6


def test_positions_that_a_resumed_request_needs_are_those_its_next_token_reads() -> None:
    firsts = {
        0: group(4, 2),
        1: group(4, 2, 6),
        2: group(4, 2, Chunk(8)),
        3: group(4, 2, 1),
    }
    for first, spec in firsts.items():
        assert resumed_from(spec, policy_of(spec), TEXT, 12) == first
    spec = group(4, 2, Chunk(6))
    assert resumed_from(spec, policy_of(spec), TEXT, 12) == 3


def test_a_chunk_that_ended_needs_nothing_to_resume() -> None:
    spec = group(4, 2, Chunk(8))
    assert hit([spec], [{}], 11) == 8
    assert hit([spec], [whole(spec, 2)], 12) == 12
    assert hit([spec], [whole(spec, 0, 1)], 12) == 8


def test_a_state_is_resumed_only_where_all_its_slices_were_kept() -> None:
    groups = [group(4, 2), state(2, 2)]
    tokens = whole(groups[0], *range(9))
    assert hit(groups, [tokens, {(8, 0): 1, (8, 1): 2, (12, 0): 3}], 30) == 8
    assert hit(groups, [tokens, {(8, 0): 1}], 30) == 0
    assert hit([state(1, 2)], [{(7, 0): 1, (3, 0): 1}], 30) == 7, "wherever that is"


def test_two_state_groups_need_the_same_place() -> None:
    groups = [state(1, 2), state(1, 3)]
    assert hit(groups, [{(8, 0): 1, (4, 0): 1}, {(6, 0): 1, (4, 0): 1}], 30) == 4


def test_images_are_found_whole_or_not_at_all() -> None:
    groups = [group(4, 2), images(GroupKind.CROSS, 4, 2)]
    facts = Facts(30, (ImageSpan(5, 1, 6), ImageSpan(9, 1, 3)))
    assert list(image_places(groups[1], facts, 12)) == [(6, 0), (6, 1), (10, 0)]
    tokens = whole(groups[0], *range(7))
    assert hit(groups, [tokens, {(6, 0): 1, (6, 1): 2, (10, 0): 3}], 20, facts) == 20
    assert hit(groups, [tokens, {(6, 0): 1, (6, 1): 2}], 20, facts) == 9, "up to the second"
    assert hit(groups, [tokens, {(6, 1): 2}], 20, facts) == 5


def test_no_prefix_ends_inside_an_image() -> None:
    facts = Facts(30, (ImageSpan(5, 6, 6),))
    full = group(4, 2)
    assert hit([full], [whole(full, 0, 1)], 9, facts) == 5
    assert hit([full], [whole(full, 0, 1, 2)], 12, facts) == 12


def test_tokens_beside_images_in_one_group_are_not_shared() -> None:
    spec = replace(group(4, 2), counts_images=True)
    assert hit([spec], [whole(spec, 0, 1)], 8) == 8
    assert hit([spec], [whole(spec, 0, 1)], 8, Facts(20, (ImageSpan(9, 1, 3),))) == 0


def test_a_prompt_that_will_be_dropped_from_is_computed_to_its_end() -> None:
    spec = dropping(4, 2, 6)
    assert hit([spec], [whole(spec, *range(5))], 19, Facts(12)) == 11
    assert hit([spec], [whole(spec, *range(5))], 19, Facts(6)) == 19
