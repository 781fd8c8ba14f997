"""How many pages: counted by hand, and by walking every chunk."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.layout import GroupSpec
from kvell.prefix.groups.facts import Facts
from kvell.prefix.groups.needs import alignment_tokens, peak_pages, resumed_from
from kvell.prefix.groups.policies import policy_of
from tests.pages.pools import Chunk, group

TEXT = Facts(1 << 20)
windows = st.sampled_from([0, 1, 2, 5, 9, 16, Chunk(1), Chunk(6), Chunk(8), Chunk(15)])
specs = st.builds(group, st.integers(1, 6), st.integers(1, 4), windows)


def walked_peak(spec: GroupSpec, until: int, chunk: int, start: int, computed: int = 0) -> int:
    """Most pages held at once when chunks end at ``start``, ``start + chunk``, …"""
    policy, size, peak = policy_of(spec), spec.page_tokens, 0
    ends = [*range(start, until, chunk), until]
    for end in ends:
        first = policy.kept_start(computed) // size
        peak = max(peak, -(-end // size) - first)
        computed = end
    return peak


@given(specs, st.integers(1, 70), st.integers(1, 20), st.data())
def test_the_peak_covers_every_way_to_walk_in_chunks(
    spec: GroupSpec, until: int, chunk: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(1, chunk))
    needed = walked_peak(spec, until, chunk, min(start, until))
    said = peak_pages(spec, TEXT, until, chunk)
    assert needed <= said <= -(-until // spec.page_tokens)


@given(specs, st.integers(1, 70), st.integers(1, 20), st.integers(0, 60))
def test_the_peak_from_here_on_covers_the_walk_from_here_on(
    spec: GroupSpec, ahead: int, chunk: int, computed: int
) -> None:
    until = computed + ahead
    needed = walked_peak(spec, until, chunk, min(until, computed + chunk), computed)
    said = peak_pages(spec, TEXT, until, chunk, computed)
    assert needed <= said <= peak_pages(spec, TEXT, until, chunk)


@given(specs, st.integers(0, 60))
def test_the_next_token_needs_what_it_reads_and_itself(spec: GroupSpec, computed: int) -> None:
    needed = walked_peak(spec, computed + 1, 1, computed + 1, computed)
    assert peak_pages(spec, TEXT, computed + 1, 1, computed) == needed


@given(specs, st.integers(100, 170), st.integers(1, 20))
def test_some_walk_comes_within_a_page_of_the_peak(spec: GroupSpec, until: int, chunk: int) -> None:
    worst = max(walked_peak(spec, until, chunk, start) for start in range(1, chunk + 1))
    assert peak_pages(spec, TEXT, until, chunk) - worst <= 1


def test_a_window_needs_itself_and_the_chunk() -> None:
    """Window 9 keeps 9 tokens; a chunk of 8 more, both straddling: 17 tokens over pages of 4."""
    assert peak_pages(group(4, 1, window=9), TEXT, 1000, 8) == 5
    assert peak_pages(group(4, 1, window=9), TEXT, 1000, 1) == 4


def test_a_chunk_needs_itself_and_the_prefill_chunk_even_where_it_ends_empty() -> None:
    """Chunk 8 keeps 7 tokens; 8 more: 15 tokens, where a window of 8 would straddle as well."""
    spec = group(4, 1, window=Chunk(8))
    assert peak_pages(spec, TEXT, 1000, 8) == 5
    assert peak_pages(spec, TEXT, 1000, 1) == 3
    assert peak_pages(spec, TEXT, 8, 1) == 2


def test_full_attention_needs_every_token_whatever_the_chunk() -> None:
    assert [peak_pages(group(4, 1), TEXT, 33, chunk) for chunk in (1, 8, 33)] == [9, 9, 9]


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


def test_prefixes_are_aligned_to_whole_pages_of_every_group() -> None:
    assert alignment_tokens([group(4, 2), group(6, 2)]) == 12
