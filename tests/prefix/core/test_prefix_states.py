"""States: where they are kept, at what rank, and who can resume from them."""

from kvell.prefix.eviction.checkpoints import is_worth_displacing
from tests.oracle.eviction.checkpoints import Sort, Usefulness, cuts
from tests.oracle.eviction.evictor import COARSE, NORMAL, SPARE
from tests.pages.pools import group, pool_of, state
from tests.prefix.mixes import text
from tests.prefix.rehearsal import Rehearsal

PROMPT = text(*range(100, 400))


def ends_of_states(rehearsal: Rehearsal, index: int = 1) -> dict[int, int]:
    """Tokens of each state in the index, and its rank in the eviction order."""
    state = rehearsal.check()
    found = (e for e in state.index if e.group == index)
    return {e.end: state.keys[index][e.page][0] for e in found}


def test_cuts_are_at_64_128_256_and_every_512_and_close_to_the_end_of_the_prompt() -> None:
    found = cuts(0, 2700, prompt_tokens=2700, matched_tokens=0, alignment=16)
    assert found == [
        (64, Sort.FINE),
        (128, Sort.FINE),
        (256, Sort.FINE),
        (512, Sort.FINE),
        (1024, Sort.FINE),
        (1536, Sort.FINE),
        (2048, Sort.COARSE),
        (2560, Sort.PROMPT_END),
        (2688, Sort.FINE),
    ]


def test_a_short_prompt_ends_at_its_last_multiple_of_64() -> None:
    assert cuts(0, 300, 300, 0, 16)[-1] == (256, Sort.PROMPT_END)
    assert cuts(0, 60, 60, 0, 16) == []


def test_a_chunk_makes_the_cuts_in_it() -> None:
    found = [cuts(a, b, 1700, 0, 16) for a, b in ((0, 128), (128, 600), (600, 1600))]
    assert [[cut for cut, _ in some] for some in found] == [[64, 128], [256, 512], [1024, 1536]]


def test_where_a_prompt_leaves_what_was_known_is_a_cut_of_its_own() -> None:
    assert (96, Sort.BRANCH) in cuts(0, 1000, 1000, matched_tokens=103, alignment=16)
    assert (64, Sort.BRANCH) in cuts(0, 1000, 1000, matched_tokens=70, alignment=16)


def test_states_count_like_pages_as_long_as_such_states_are_used_again() -> None:
    seen = Usefulness()
    assert {sort: seen.rank(sort) for sort in Sort} == {
        Sort.FINE: SPARE,
        Sort.COARSE: COARSE,
        Sort.WAYPOINT: NORMAL,
        Sort.PROMPT_END: NORMAL,
        Sort.BRANCH: NORMAL,
        Sort.TURN_END: NORMAL,
    }
    for _ in range(65):
        for sort in Sort:
            seen.note_wasted(sort, SPARE)
    assert seen.rank(Sort.TURN_END) == NORMAL, "what goes first in any case proves nothing"
    for _ in range(65):
        for sort in Sort:
            seen.note_wasted(sort, NORMAL)
    spare = {sort for sort in Sort if seen.rank(sort) == SPARE}
    assert spare == {Sort.FINE, Sort.PROMPT_END, Sort.TURN_END}
    seen.note_used(Sort.PROMPT_END)
    assert seen.rank(Sort.PROMPT_END) == NORMAL
    assert seen.rank(Sort.TURN_END) == SPARE


def test_few_turn_ends_are_kept_before_one_is_used() -> None:
    seen = Usefulness()
    kept = 0
    while seen.rank(Sort.TURN_END) == NORMAL:
        seen.note_wasted(Sort.TURN_END, NORMAL)
        kept += 1
    assert kept == 17
    for _ in range(2):
        seen.note_used(Sort.TURN_END)
    while seen.rank(Sort.TURN_END) == NORMAL:
        seen.note_wasted(Sort.TURN_END, NORMAL)
        kept += 1
    assert kept == 17 + 16, "eight more for each that was used"


def test_what_was_seen_long_ago_counts_half() -> None:
    seen = Usefulness()
    for _ in range(40):
        seen.note_used(Sort.PROMPT_END)
    for _ in range(256 + 96):
        seen.note_wasted(Sort.PROMPT_END, NORMAL)
    assert seen.rank(Sort.PROMPT_END) == NORMAL, "224 wasted, 20 used"
    seen.note_wasted(Sort.PROMPT_END, NORMAL)
    assert seen.rank(Sort.PROMPT_END) == SPARE


def test_cuts_fall_where_attentions_pages_end() -> None:
    assert [cut for cut, _ in cuts(0, 200, 200, 0, 48)] == [48, 96, 192]


def test_decoding_makes_no_cut_but_every_512_tokens() -> None:
    assert cuts(700, 701, prompt_tokens=650, matched_tokens=0, alignment=16) == []
    found = cuts(1023, 1024, prompt_tokens=650, matched_tokens=0, alignment=16)
    assert found == [(1024, Sort.FINE)]


def test_a_state_may_displace_what_its_tokens_are_worth() -> None:
    """512 tokens saved always are; fewer when a fourth of the state's bytes would hold them."""
    layout = pool_of(4, group(16, 16), state(2, 1))
    tokens, both = layout.groups[0], layout.groups
    assert tokens.page_stride_bytes / 16 == layout.large_page_bytes / 256
    assert not is_worth_displacing(both[1], both, 127)
    assert is_worth_displacing(both[1], both, 128)
    assert is_worth_displacing(both[1], both[1:], 512)
    assert not is_worth_displacing(both[1], both[1:], 511)


def test_the_second_request_makes_the_state_at_the_branch_and_the_third_hits_it() -> None:
    rehearsal = Rehearsal(pool_of(200, group(16, 2), state(2, 2)))
    assert rehearsal.finish(PROMPT) == 0
    shared = PROMPT.tokens[:200]
    assert rehearsal.finish(text(*shared, *range(100))) == 128, "a cut on the way"
    assert 192 in ends_of_states(rehearsal), "the branch, where a page ends"
    assert rehearsal.finish(text(*shared, *range(1000, 1100))) == 192


def test_states_on_the_way_are_spare_and_those_at_ends_and_branches_are_not() -> None:
    rehearsal = Rehearsal(pool_of(200, group(16, 2), state(1, 2)))
    rehearsal.finish(PROMPT)
    assert ends_of_states(rehearsal) == {
        64: SPARE,
        128: SPARE,
        256: NORMAL,
        300: NORMAL,
    }, "256 is also the prompt's last multiple of 64; 300 ends the turn"


def test_the_end_of_a_turn_is_kept_in_place_and_the_next_turn_hits_it() -> None:
    rehearsal = Rehearsal(pool_of(60, group(16, 2), state(3, 3)))
    turn = rehearsal.serve(text(*range(20)), 20)
    pages = set(rehearsal.pages(turn)[1].values())
    rehearsal.append([turn], 7)
    rehearsal.reach(turn, 21)
    rehearsal.close(turn, renew=True)
    kept = {e.page for e in rehearsal.check().index if e.group == 1}
    assert kept == pages, "no copy: the running state itself"
    assert rehearsal.finish(text(*range(20), 7, 8, 9)) == 21


def test_a_resumed_state_is_copied_and_stays() -> None:
    rehearsal = Rehearsal(pool_of(60, group(16, 2), state(2, 2)))
    rehearsal.finish(text(*range(20)))
    first = rehearsal.serve(text(*range(20), 1, 1), 22)
    second = rehearsal.serve(text(*range(20), 2, 2), 22)
    states = [set(rehearsal.pages(r)[1].values()) for r in (first, second)]
    assert not states[0] & states[1]
    assert rehearsal.peek(text(*range(20), 3)) == 20


def test_what_ends_without_renewal_leaves_no_state() -> None:
    rehearsal = Rehearsal(pool_of(60, group(16, 2), state(1, 2)))
    request = rehearsal.serve(text(*range(20)), 20)
    rehearsal.close(request, renew=False)
    assert ends_of_states(rehearsal) == {}


def test_part_of_a_state_is_no_state() -> None:
    """Three slices, each a large page; two go, and nothing is left to resume from."""
    rehearsal = Rehearsal(pool_of(6, group(16, 1), state(3, 1)))
    rehearsal.finish(text(*range(20)))
    rehearsal.serve(text(*range(500, 510)), 10)
    assert len(ends_of_states(rehearsal)) <= 1
    assert rehearsal.peek(text(*range(20), 3)) == 0


def test_states_on_the_way_are_not_kept_where_memory_is_in_use() -> None:
    """Nine pages for 130 tokens and one for the state: there is room for no more."""
    rehearsal = Rehearsal(pool_of(10, group(16, 1), state(1, 1)))
    request = rehearsal.serve(PROMPT, 130)
    assert ends_of_states(rehearsal) == {}
    assert rehearsal.check().rungs["skip_checkpoint"] == 2
    rehearsal.close(request, renew=True)
    assert list(ends_of_states(rehearsal)) == [130]


def test_spare_states_go_first() -> None:
    """Twenty-two large pages, all in use or cached: a newcomer takes those on the way."""
    rehearsal = Rehearsal(pool_of(22, group(16, 1), state(1, 1)))
    rehearsal.finish(text(*PROMPT.tokens[:260]))
    assert sorted(ends_of_states(rehearsal)) == [64, 128, 256, 260]
    rehearsal.serve(text(1, 2, 3), 3)
    ends = ends_of_states(rehearsal)
    assert 64 not in ends or 128 not in ends
    assert {256, 260} <= set(ends)
    assert rehearsal.peek(text(*PROMPT.tokens[:260], 5)) == 260


def test_checkpoint_pages_are_counted() -> None:
    rehearsal = Rehearsal(pool_of(200, group(16, 2), state(2, 2)))
    rehearsal.finish(PROMPT)
    assert rehearsal.core.totals().checkpoint_pages == (0, 3 * 2)
