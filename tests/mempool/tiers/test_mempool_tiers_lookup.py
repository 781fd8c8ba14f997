"""Digests, pages in the buffer, and one lookup over both tiers: small cases by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvell.cost.swap_rule import SwapRule
from kvell.elastic.page_buffer import PageBuffer
from kvell.memory import GroupSpec
from kvell.mempool.tiers.buffered import BufferedPages, key, needed_pages
from kvell.mempool.tiers.digests import PrefixDigests
from kvell.mempool.tiers.lookup import Tiers
from tests.pages.pools import group, pool_of, state

Ints = np.ndarray[Any, np.dtype[np.int32]]
Where = Sequence[tuple[int, int, int]]
"""(group, end, part) of pages."""


def ints(tokens: Sequence[int]) -> Ints:
    return np.asarray(tokens, np.int32)


class TestDigests:
    def test_equal_beginnings_have_equal_names(self) -> None:
        tokens = list(range(300))
        one, other = PrefixDigests(ints(tokens), "r"), PrefixDigests(ints([*tokens[:200], 7]), "r")
        for length in (0, 1, 63, 64, 65, 128, 199, 200):
            assert one.of(length) == other.of(length)
        assert one.of(201) != other.of(201)
        assert len({one.of(length) for length in range(301)}) == 301

    def test_the_order_of_asking_does_not_matter(self) -> None:
        tokens = ints(list(range(500)))
        upward, downward = PrefixDigests(tokens, ""), PrefixDigests(tokens, "")
        names = [upward.of(length) for length in range(0, 500, 37)]
        assert [downward.of(length) for length in reversed(range(0, 500, 37))] == names[::-1]
        assert [downward.of(length) for length in range(0, 500, 37)] == names, "asked again"

    def test_roots_share_no_name(self) -> None:
        assert PrefixDigests(ints([1]), "a").of(1) != PrefixDigests(ints([1]), "b").of(1)
        assert PrefixDigests(ints([]), "1:a").of(0) != PrefixDigests(ints([]), "a").of(0)

    @pytest.mark.parametrize("length", [-1, 4])
    def test_a_length_that_there_is_not(self, length: int) -> None:
        with pytest.raises(ValueError, match="3 tokens"):
            PrefixDigests(ints([1, 2, 3]), "").of(length)


TEXT = ints([(i * i) % 97 for i in range(41)])
FULL, WINDOW, STATE = group(4, 1), group(4, 1, window=9), state(2, 1)


def whole(index: int, positions: Sequence[int], size: int = 4) -> Where:
    return [(index, (position + 1) * size, 0) for position in positions]


class Both:
    """A text whose pages are put into either tier."""

    def __init__(self, *groups: GroupSpec, text: Ints = TEXT, num_large: int = 30) -> None:
        self.layout = pool_of(num_large, *groups)
        self.pages = BufferedPages(self.layout.groups, PageBuffer(self.layout.groups, num_large))
        self.digests = PrefixDigests(text, "")
        self.known: list[tuple[int, int, int, int]] = []

    def buffered(self, where: Where) -> "Both":
        for index, end, part in where:
            assert self.pages.put(index, (end, part), self.digests) is not None
        return self

    def pooled(self, where: Where) -> "Both":
        for index, end, part in where:
            spec = self.layout.groups[index]
            position = part if spec.layers_per_page == 1 else (end - 1) // spec.page_tokens
            self.known.append((index, position, len(self.known), end))
        return self

    def tiers(self, text: Ints | None = None, own: Sequence[int] | None = None) -> Tiers:
        digests = self.digests if text is None else PrefixDigests(text, "")
        known = np.asarray(self.known, np.int32).reshape(-1, 4)
        return Tiers(self.pages, own or range(len(self.layout.groups)), digests, known)


class TestBufferAlone:
    def test_full_attention_reaches_as_far_as_there_is_no_hole(self) -> None:
        for positions, reached in (((), 0), ((0, 1, 2), 12), ((0, 1, 3, 4), 8), ((1, 2), 0)):
            assert Both(FULL).buffered(whole(0, positions)).tiers().longest == reached

    def test_a_last_token_is_left_and_other_tokens_are_another_page(self) -> None:
        both = Both(FULL).buffered(whole(0, (0, 1, 2)))
        assert both.tiers(TEXT[:12]).longest == 8
        assert both.tiers(TEXT[:13]).longest == 12
        other = TEXT.copy()
        other[9] += 1
        assert both.tiers(other).longest == 8

    def test_a_window_needs_its_last_tokens_only(self) -> None:
        for positions, reached in (((3, 4), 20), ((4,), 0), ((2, 3, 6, 7), 32), ((0,), 4)):
            assert Both(WINDOW).buffered(whole(0, positions)).tiers().longest == reached, positions

    def test_all_groups_must_reach(self) -> None:
        both = Both(FULL, group(2, 1, window=5)).buffered(whole(0, (0, 1, 2)))
        assert both.tiers().longest == 0
        assert both.tiers(own=[0]).longest == 12
        tiers = both.buffered(whole(1, (2, 3), 2)).tiers()
        assert tiers.longest == 8
        assert [(index, at) for index, at, _ in tiers.places(8)] == [(0, 0), (0, 1), (1, 2), (1, 3)]

    def test_where_a_text_ended_it_goes_on_inside_a_page(self) -> None:
        both = Both(FULL, group(2, 1)).buffered([*whole(0, (0,)), *whole(1, range(3), 2)])
        assert both.tiers().longest == 4
        assert both.buffered([(0, 6, 0)]).tiers().longest == 6
        assert both.pages.ends() == [6]
        assert both.tiers(TEXT[:6]).longest == 4, "its last token is left"

    def test_a_state_serves_one_length_with_all_its_parts(self) -> None:
        both = Both(FULL, STATE).buffered(whole(0, range(5)))
        assert both.tiers().longest == 0
        assert both.buffered([(1, 12, 0)]).tiers().longest == 0
        tiers = both.buffered([(1, 12, 1)]).tiers()
        assert tiers.lengths.tolist() == [12]
        assert list(tiers.places(12))[-2:] == [(1, 0, (12, 0)), (1, 1, (12, 1))]

    def test_the_longest_unused_goes_first_and_what_a_plan_uses_or_pins_stays(self) -> None:
        both = Both(FULL, num_large=4).buffered(whole(0, range(4)))
        pages, keys = both.pages, [key(0, (end, 0), both.digests) for end in range(4, 28, 4)]
        assert pages.put(0, (20, 0), both.digests) is None, "all of it is of this plan"
        pages.begin()
        pages.touch([keys[0]])
        pages.pins.update([keys[1]])
        assert pages.put(0, (20, 0), both.digests) is not None
        assert [one in pages for one in keys[:5]] == [True, True, False, True, True]
        assert pages.forget(keys[:2]) == 1, "one is pinned"
        pages.unpin([keys[1]])
        assert pages.forget(keys[:2]) == 1
        pages.clear()
        assert len(pages) == 0
        assert both.tiers().longest == 0

    def test_ends_are_forgotten_with_their_pages(self) -> None:
        both = Both(FULL).buffered([(0, 4, 0), (0, 6, 0)])
        assert both.pages.ends() == [6]
        assert both.pages.forget([key(0, (6, 0), both.digests)]) == 1
        assert both.pages.ends() == []


class TestBothTiers:
    """Half here and half there is one hit."""

    @pytest.mark.parametrize(
        ("pooled", "buffered", "reached"),
        [
            ((0, 1), (2, 3), 16),
            ((2, 3), (0, 1), 16),
            ((0, 2), (1, 3), 16),
            ((0, 1, 2, 3), (2, 3), 16),
            ((0, 1), (3,), 8),
            ((1, 2), (3,), 0),
        ],
    )
    def test_pages_of_full_attention(
        self, pooled: Sequence[int], buffered: Sequence[int], reached: int
    ) -> None:
        tiers = Both(FULL).pooled(whole(0, pooled)).buffered(whole(0, buffered)).tiers()
        assert tiers.longest == reached
        lacking = len([at for at in range(reached // 4) if at not in pooled])
        stride_bytes = Both(FULL).layout.groups[0].page_stride_bytes
        assert tiers.longest == 0 or tiers.copied_bytes[-1] == lacking * stride_bytes

    def test_one_group_here_and_the_other_there(self) -> None:
        both = Both(FULL, WINDOW, STATE).pooled(whole(0, range(4)))
        assert both.tiers().longest == 0
        both.buffered([*whole(1, (2,)), (2, 16, 0)]).pooled([*whole(1, (3,)), (2, 16, 1)])
        tiers = both.tiers()
        assert tiers.longest == 16
        in_pool = [place in tiers.pool[index] for index, _, place in tiers.places(16)]
        assert in_pool == [True] * 4 + [False, True, False, True]

    def test_a_half_full_page_of_either_tier(self) -> None:
        both = Both(FULL, WINDOW).pooled([*whole(0, range(3)), *whole(1, (1, 2)), (0, 14, 0)])
        assert both.tiers().longest == 12
        assert both.buffered([(1, 14, 0)]).tiers().longest == 14

    def test_places_of_a_length(self) -> None:
        assert list(needed_pages(FULL, 0)) == []
        assert list(needed_pages(FULL, 6)) == [(0, (4, 0)), (1, (6, 0))]
        assert list(needed_pages(WINDOW, 16)) == [(2, (12, 0)), (3, (16, 0))]
        assert list(needed_pages(STATE, 3)) == [(0, (3, 0)), (1, (3, 1))]


class TestBestLength:
    """A group of full attention in both tiers, and a window that only has to be copied far out."""

    def both(self) -> Both:
        everywhere = Both(FULL, group(4, 1, window=17)).pooled(whole(0, range(10)))
        return everywhere.pooled(whole(1, range(4))).buffered(whole(1, range(4, 10)))

    def test_what_is_copied_grows_with_the_length_until_the_window_is_full(self) -> None:
        tiers = self.both().tiers()
        assert tiers.lengths.tolist() == list(range(4, 44, 4))
        page_bytes = Both(FULL).layout.groups[0].page_stride_bytes
        pages = (tiers.copied_bytes // page_bytes).tolist()
        assert pages == [0, 0, 0, 0, 1, 2, 3, 4, 4, 4]

    @pytest.mark.parametrize(
        ("bytes_per_token", "best"),
        [
            (0.0, 16),
            (4.0, 16),
            (64.0, 40),
        ],
    )
    def test_as_far_as_the_bytes_are_worth_their_tokens(
        self, bytes_per_token: float, best: int
    ) -> None:
        """A page of 64 bytes saves four tokens at first, and then nothing more is copied."""
        assert self.both().tiers().best(16, SwapRule(bytes_per_token)) == best

    def test_a_part_may_be_better_than_all(self) -> None:
        """Beyond a point every length needs a state as large as the tokens before it."""
        both = Both(FULL, STATE).pooled(whole(0, range(8)))
        both.pooled([(1, 20, 0), (1, 20, 1)]).buffered([*whole(0, (8, 9)), (1, 40, 0), (1, 40, 1)])
        tiers = both.tiers()
        assert tiers.lengths.tolist() == [20, 40]
        assert tiers.copied_bytes[0] == 0
        further = int(tiers.copied_bytes[1]) / 20
        assert tiers.best(0, SwapRule(0.9 * further)) == 20
        assert tiers.best(0, SwapRule(1.1 * further)) == 40

    def test_it_is_the_best_of_all_lengths(self) -> None:
        """Against trying every one of them."""
        draw = np.random.default_rng(5)
        cases = 0
        for _ in range(300):
            both = Both(FULL, group(4, 1, window=13), num_large=60)
            for index in (0, 1):
                tier = draw.choice(["pool", "buffer", "none"], 10, p=[0.5, 0.42, 0.08])
                both.pooled(whole(index, np.flatnonzero(tier == "pool").tolist()))
                both.buffered(whole(index, np.flatnonzero(tier == "buffer").tolist()))
            tiers, rule = both.tiers(), SwapRule(float(draw.integers(1, 80)))
            hit = int(draw.integers(0, 12))
            gains = {hit: 0.0} | {
                int(length): (length - hit) * rule.most_bytes - float(size)
                for length, size in zip(tiers.lengths, tiers.copied_bytes, strict=True)
                if length > hit
            }
            best = tiers.best(hit, rule)
            assert gains[best] == max(gains.values())
            cases += hit < best < max(gains)
        assert cases > 10, "a part is sometimes best"
