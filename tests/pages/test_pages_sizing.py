"""From layers to page sizes: the paper's example, a real shape, and what holds for any."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething
from kvell.pages.grouping import ALIGNMENT_BYTES
from kvell.pages.layout import GroupKind, LayerSpec
from kvell.pages.sizing import (
    MANAGERS,
    MAX_PADDING,
    Manager,
    choose_large_page_bytes,
    equal_shares,
    larges_for,
    plan_layout,
    proportional_shares,
)
from kvell.vocabulary import GIB, KIB, MIB
from tests.pages.pools import layers

GEMMA3_270M = layers([512, 512, 512, 512, 512, 0] * 3)

any_layers = st.lists(
    st.builds(
        lambda window, heads, size, element: (window, heads, size, element),
        st.sampled_from([0, 0, 128, 512, 4096]),
        st.integers(1, 9),
        st.sampled_from([16, 24, 64, 80, 96, 128, 256]),
        st.sampled_from([1, 2, 4]),
    ).map(lambda t: (GroupKind.SLIDING if t[0] else GroupKind.FULL, *t)),
    min_size=1,
    max_size=24,
).map(
    lambda shapes: [
        LayerSpec(i, kind, heads, size, element, window)
        for i, (kind, window, heads, size, element) in enumerate(shapes)
    ]
)
page_sizes = st.lists(
    st.integers(1, 4000).map(lambda n: n * ALIGNMENT_BYTES), min_size=1, max_size=4
)


def test_jenga_fig_6_two_groups_meet_in_their_least_common_multiple() -> None:
    """2 layers × 128 bytes and 3 × 128 a token: small pages of 256 and 384, large of 768."""
    shapes = [
        LayerSpec(i, GroupKind.SLIDING if i < 2 else GroupKind.FULL, 1, 32, 2, 100 if i < 2 else 0)
        for i in range(5)
    ]
    layout = plan_layout(shapes, MIB, page_tokens=1)
    assert [g.page_stride_bytes for g in layout.groups] == [256, 384]
    assert layout.large_page_bytes == math.lcm(256, 384) == 768
    assert [g.pages_per_large for g in layout.groups] == [3, 2]
    assert (layout.sizing_rule, layout.num_large_pages) == ("lcm", MIB // 768)


def test_gemma3_270m_has_two_groups_and_a_large_page_is_one_sliding_or_five_full() -> None:
    layout = plan_layout(GEMMA3_270M, 192 * MIB)
    sliding, full = layout.groups
    assert (sliding.name, len(sliding.layers), sliding.window_tokens) == ("sliding(512)", 15, 512)
    assert (full.name, full.layers) == ("full", (5, 11, 17))
    assert layout.large_page_bytes == 245_760
    assert (sliding.pages_per_large, full.pages_per_large) == (1, 5)
    assert sliding.padding_bytes == full.padding_bytes == 0
    assert layout.num_large_pages == 192 * MIB // 245_760


def test_groups_are_by_kind_and_window_and_size_never_by_count() -> None:
    shapes = [*layers([0] + [128] * 47), LayerSpec(48, GroupKind.SLIDING, 2, 256, 2, 128)]
    groups = plan_layout(shapes, 64 * GIB).groups
    assert [len(g.layers) for g in groups] == [1, 47, 1]
    assert [g.name for g in groups] == ["full", "sliding(128)/1024B", "sliding(128)/2048B"]


def test_layers_that_read_anothers_tokens_are_in_no_group() -> None:
    shapes = [*layers([0, 64]), LayerSpec(2, GroupKind.FULL, 1, 256, 2, kv_of=0)]
    for manager in MANAGERS:
        groups = plan_layout(shapes, GIB, manager=manager).groups
        assert sorted(i for g in groups for i in g.layers) == [0, 1]
    with pytest.raises(ChangeSomething, match="stores no KV cache"):
        plan_layout(shapes[2:], GIB)


def test_padding_buys_a_small_large_page_where_the_multiple_explodes() -> None:
    pages = [64 * 1000, 64 * 1009]
    assert choose_large_page_bytes(pages, 4 * GIB) == (64 * 1009, "padded")
    assert math.lcm(*pages) == 64 * 1000 * 1009


def test_a_small_pool_takes_the_largest_page_rather_than_a_large_multiple() -> None:
    size, rule = choose_large_page_bytes([64 * 97, 64 * 101], 64 * KIB)
    assert rule == "largest-page"
    assert 64 * 101 <= size <= 2 * 64 * 101


@given(page_sizes, st.integers(1 * MIB, 64 * GIB))
def test_large_pages_keep_to_the_cap_and_padding_to_its_limit(pages: list[int], pool: int) -> None:
    size, rule = choose_large_page_bytes(pages, pool)
    cap = min(pool // 64, max(64 * MIB, pool // 256))
    assert size >= max(pages)
    assert size <= cap or max(pages) == math.lcm(*pages) or rule == "largest-page"
    assert rule != "largest-page" or math.lcm(*pages) > cap
    if rule == "padded":
        assert all(size / (size // p * p) - 1 <= MAX_PADDING for p in pages)
    if rule == "lcm":
        assert size == math.lcm(*pages)


@given(any_layers, st.integers(20, 36), st.sampled_from(MANAGERS), st.sampled_from([1, 8, 16]))
def test_every_group_divides_the_large_page_whatever_the_model(
    shapes: list[LayerSpec], exponent: int, manager: Manager, page_tokens: int
) -> None:
    kv_bytes = 3 << exponent
    try:
        layout = plan_layout(shapes, kv_bytes, manager=manager, page_tokens=page_tokens)
    except ChangeSomething as error:
        assert error.field == "--kv-memory"
        return
    assert sorted(i for g in layout.groups for i in g.layers) == list(range(len(shapes)))
    assert 0 <= kv_bytes - layout.pool_bytes < layout.large_page_bytes
    for spec in layout.groups:
        assert spec.page_stride_bytes * spec.pages_per_large == layout.large_page_bytes
        assert spec.page_stride_bytes % ALIGNMENT_BYTES == 0
        assert spec.padding_bytes >= 0
        aligned = -(-spec.page_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if layout.sizing_rule == "padded":
            assert spec.page_stride_bytes <= aligned * (1 + MAX_PADDING)
        if layout.sizing_rule == "lcm":
            assert spec.page_stride_bytes == aligned


def test_the_paged_manager_gives_every_layer_every_token() -> None:
    layout = plan_layout(GEMMA3_270M, 192 * MIB, manager="paged")
    (only,) = layout.groups
    assert (only.kind, only.window_tokens, only.layers) == (GroupKind.FULL, 0, tuple(range(18)))
    assert only.pages_per_large == 1
    assert only.page_stride_bytes == 18 * 16 * 1024


def test_the_paged_manager_sizes_for_the_largest_layer() -> None:
    shapes = [*layers([0]), LayerSpec(1, GroupKind.FULL, 4, 256, 2)]
    assert plan_layout(shapes, MIB, manager="paged").groups[0].layer_token_bytes == 4096


def test_the_jenga_manager_differs_from_kvell_by_its_order_alone() -> None:
    ours, theirs = (plan_layout(GEMMA3_270M, 192 * MIB, manager=m) for m in MANAGERS[:2])
    assert (ours.association, theirs.association) == ("demand", "literal")
    assert replace(theirs, association="demand") == ours


def test_the_max_page_manager_pads_every_page_to_the_largest() -> None:
    layout = plan_layout(GEMMA3_270M, 192 * MIB, manager="max-page")
    assert layout.sizing_rule == "max-page"
    assert [g.pages_per_large for g in layout.groups] == [1, 1]
    assert [g.page_stride_bytes for g in layout.groups] == [245_760, 245_760]
    assert [g.padding_bytes for g in layout.groups] == [0, 4 * 245_760 // 5]


def test_the_static_manager_cuts_the_pool_into_the_same_number_of_pages() -> None:
    """A page of 15 sliding layers takes a large page, five of 3 full layers share one."""
    layout = plan_layout(GEMMA3_270M, 120 * 245_760, manager="static")
    assert layout.num_large_pages == 120
    assert layout.quota_large_pages == (100, 20)


def test_an_unknown_manager_is_named_with_those_there_are() -> None:
    with pytest.raises(
        ChangeSomething,
        match=r"--manager=buddy: .*use one of kvell, jenga, paged, max-page, static, manual",
    ) as told:
        plan_layout(GEMMA3_270M, MIB, manager="buddy")  # type: ignore[arg-type]
    assert told.value.field == "--manager"


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ChangeSomething, match="stores no KV cache"):
        plan_layout([], MIB)


@pytest.mark.parametrize("manager", MANAGERS)
def test_too_little_memory_says_how_much_is_enough(manager: Manager) -> None:
    pages = 2 if manager == "static" else 1
    with pytest.raises(ChangeSomething, match="smaller than one page") as told:
        plan_layout(GEMMA3_270M, 1000, manager=manager)
    assert (told.value.field, told.value.value) == ("--kv-memory", "1KB")
    kib = int(told.value.remedy.removeprefix("use at least ").removesuffix("KiB"))
    assert plan_layout(GEMMA3_270M, kib * KIB, manager=manager).num_large_pages == pages


counts = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def test_shares_counted_by_hand() -> None:
    """Ten large pages of 1 or 4: eight pages each take 8 + 2."""
    assert equal_shares([1, 4], 10) == (8, 2)
    assert equal_shares([3], 7) == (7,)


def test_a_pool_smaller_than_its_groups_has_no_shares() -> None:
    assert equal_shares([1, 4, 4], 2) == (0, 0, 0)


@given(counts, st.integers(0, 60))
def test_shares_hold_equally_many_pages_and_one_more_would_not_go_in(
    per_large: list[int], num_large: int
) -> None:
    shares = equal_shares(per_large, num_large)
    assert sum(shares) <= num_large
    pages = min(share * count for share, count in zip(shares, per_large, strict=True))
    assert larges_for(pages, per_large) == list(shares)
    assert sum(larges_for(pages + 1, per_large)) > num_large


def test_proportions_by_hand() -> None:
    """Of 12, one each; ten more as 3 to 1: 7.5 and 2.5, the half goes to the first."""
    assert proportional_shares([3, 1], 12) == (9, 3)
    assert proportional_shares([5], 4) == (4,)


def test_a_share_is_never_nothing_unless_all_are() -> None:
    assert proportional_shares([10**9, 1], 3) == (2, 1)
    assert proportional_shares([10**9, 1], 1) == (0, 0)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5), st.integers(5, 10**5))
def test_proportions_give_out_everything_and_round_by_less_than_one(
    weights: list[int], num_large: int
) -> None:
    shares = proportional_shares(weights, num_large)
    spare = num_large - len(weights)
    assert sum(shares) == num_large
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - 1 - spare * weight / sum(weights)) < 1
