"""Sizes of states, images and drafters under every manager; the peers' figures."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvell.errors import ChangeSomething
from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec, Layout, as_draft
from kvell.pages.sizing import MANAGERS, MAX_PADDING, Manager, plan_layout
from kvell.vocabulary import GIB, MIB

FULL, STATE, CROSS, VISION = GroupKind.FULL, GroupKind.STATE, GroupKind.CROSS, GroupKind.VISION


def attention(
    *indices: int, heads: int = 8, size: int = 128, kind: GroupKind = FULL
) -> list[LayerSpec]:
    return [LayerSpec(i, kind, heads, size, 2) for i in indices]


def states(*indices: int, size: int) -> list[LayerSpec]:
    return [LayerSpec(i, STATE, 0, 0, 2, state_bytes=size) for i in indices]


def embeddings(index: int, hidden: int) -> LayerSpec:
    return LayerSpec(index, VISION, 1, hidden, 2, tensors=1)


def hybrid(pattern: str, state_bytes: int, heads: int = 8, size: int = 128) -> list[LayerSpec]:
    """M: a state; F: full attention."""
    return [
        states(i, size=state_bytes)[0] if letter == "M" else attention(i, heads=heads, size=size)[0]
        for i, letter in enumerate(pattern)
    ]


JAMBA = hybrid("MMMMFMMM" * 4, 311_296)
QWEN3_NEXT = hybrid("MMMF" * 12, 1_097_728, heads=2, size=256)
NEMOTRON = hybrid("MMMMMFM" * 4, 4_255_744)
LFM2 = [
    *states(0, 1, 3, 4, 6, 7, 9, 11, 13, 15, size=8192),
    *attention(2, 5, 8, 10, 12, 14, size=64),
]
KIMI = [*states(*range(20), size=2_170_880), *attention(*range(20, 27), heads=1, size=288)]
LLAMA_VISION = [*attention(*range(32)), *attention(*range(32, 40), kind=CROSS)]
LLAVA = [*attention(*range(28), heads=4), embeddings(28, 3584)]
HYBRIDS = {
    "jamba": JAMBA,
    "qwen3-next": QWEN3_NEXT,
    "nemotron": NEMOTRON,
    "lfm2": LFM2,
    "kimi": KIMI,
}


def by_name(layout: Layout) -> dict[str, GroupSpec]:
    return {group.name: group for group in layout.groups}


@pytest.mark.parametrize(
    ("layers", "pool_gib", "large_bytes", "pages"),
    [
        (JAMBA, 3, 3_432_000, {"state": 11, "full": 13}),
        (QWEN3_NEXT, 6, 5_505_920, {"state": 5, "full": 14}),
        (NEMOTRON, 6, 12_851_328, {"state": 3, "full": 49}),
    ],
)
def test_large_pages_of_hybrids(
    layers: Sequence[LayerSpec], pool_gib: int, large_bytes: int, pages: dict[str, int]
) -> None:
    """A state page holds one layer; 3.4, 5.5 and 12.9 MB waste at most 1 % of any page."""
    layout = plan_layout(layers, pool_gib * GIB)
    assert (layout.large_page_bytes, layout.sizing_rule) == (large_bytes, "padded")
    assert {group.name: group.pages_per_large for group in layout.groups} == pages
    for group in layout.groups:
        assert group.padding_bytes <= MAX_PADDING * group.page_bytes
    state = by_name(layout)["state"]
    assert (state.page_tokens, state.layers_per_page) == (1, 1)
    assert state.slices == len(state.layers)


def test_small_states_share_a_page() -> None:
    """Ten convolutions of 8 KiB fit beside a token page of 6 × 32 KiB."""
    layout = plan_layout(LFM2, 16 * GIB)
    state, full = by_name(layout)["state"], by_name(layout)["full"]
    assert full.page_bytes == 6 * 16 * 2048
    assert (state.layers_per_page, state.slices, state.page_bytes) == (10, 1, 81_920)
    assert layout.large_page_bytes == 983_040
    assert state.padding_bytes == full.padding_bytes == 0


def test_a_state_page_is_no_larger_than_the_largest_token_page() -> None:
    """Twelve states of 10 KiB beside a token page of 64 KiB: six layers, not twelve."""
    layout = plan_layout([*states(*range(12), size=10_240), *attention(12)], GIB)
    assert by_name(layout)["state"].layers_per_page == 6


def test_states_alone_are_one_page_each() -> None:
    (state,) = plan_layout(states(*range(8), size=1 << 20), GIB).groups
    assert (state.layers_per_page, state.slices, state.page_bytes) == (8, 1, 8 << 20)


def test_states_are_cut_smaller_where_only_that_keeps_padding_low() -> None:
    """Zamba 2: 3 layers of 962,048 in 5,963,776 waste 3 %; five token pages hold 31 of one."""
    layers = [*states(*range(81), size=962_048), *attention(*range(81, 94), heads=32, size=224)]
    layout = plan_layout(layers, 16 * GIB)
    assert by_name(layout)["state"].layers_per_page == 1
    assert layout.sizing_rule == "padded"
    assert all(g.padding_bytes <= MAX_PADDING * g.page_bytes for g in layout.groups)
    small = plan_layout(layers, 64 * MIB)
    assert (small.sizing_rule, by_name(small)["state"].layers_per_page) == ("largest-page", 3)


def test_attention_and_state_of_one_layer_are_two_groups() -> None:
    layers = [*attention(0, 1), *states(0, 1, size=65_536)]
    layout = plan_layout(layers, GIB)
    assert [group.layers for group in layout.groups] == [(0, 1), (0, 1)]
    assert layout.group_of_layer(1, STATE) != layout.group_of_layer(1)


def test_states_of_two_sizes_are_two_groups() -> None:
    names = [g.name for g in plan_layout([*states(0, size=640), *states(1, size=1280)], GIB).groups]
    assert names == ["state/640B", "state/1280B"]


@pytest.mark.parametrize(
    ("layers", "tokens", "vllm_groups"),
    [(JAMBA, 80, 8), (QWEN3_NEXT, 544, 4), (NEMOTRON, 1040, 7)],
)
def test_paged_hybrids_are_as_vllm_cuts_them(
    layers: Sequence[LayerSpec], tokens: int, vllm_groups: int
) -> None:
    """Tokens of a page and the pages that a short request takes, as in the peers' table."""
    layout = plan_layout(layers, 6 * GIB, manager="paged")
    full, state = by_name(layout)["all"], by_name(layout)["state"]
    assert full.page_tokens == tokens
    assert 1 + state.slices == vllm_groups
    assert full.page_stride_bytes == state.page_stride_bytes == layout.large_page_bytes
    part_bytes = full.layer_page_bytes
    assert part_bytes - 16 * full.layer_token_bytes < state.layer_token_bytes <= part_bytes


@pytest.mark.parametrize(("layers", "tokens", "per_page"), [(KIMI, 1888, 1), (LFM2, 16, 2)])
def test_paged_state_pages_divide_a_token_page_where_layers_do_not(
    layers: Sequence[LayerSpec], tokens: int, per_page: int
) -> None:
    """7 attention layers and 20 states: parts of one; 6 and 10: parts of two."""
    layout = plan_layout(layers, 6 * GIB, manager="paged")
    full, state = by_name(layout)["all"], by_name(layout)["state"]
    assert (full.page_tokens, state.layers_per_page) == (tokens, per_page)
    assert full.page_bytes == full.page_stride_bytes
    assert full.page_bytes * per_page == state.page_stride_bytes * len(full.layers)


def test_paged_holds_all_tokens_and_images_in_every_layer() -> None:
    (group,) = plan_layout(LLAMA_VISION, GIB, manager="paged").groups
    assert (group.kind, len(group.layers), group.window_tokens) == (FULL, 40, 0)
    assert group.counts_images
    (text,) = plan_layout(LLAMA_VISION[:32], GIB, manager="paged").groups
    assert not text.counts_images


def test_paged_embeddings_keep_pages_of_the_one_size() -> None:
    """16 tokens × 28 layers × 2 KiB hold 128 embeddings of 7 KiB."""
    full, vision = plan_layout(LLAVA, GIB, manager="paged").groups
    assert vision.page_stride_bytes == full.page_stride_bytes == 16 * 28 * 2048
    assert (vision.kind, vision.page_tokens, vision.padding_bytes) == (VISION, 128, 0)


def test_image_groups_count_tokens_by_the_page() -> None:
    full, cross = plan_layout(LLAMA_VISION, GIB).groups
    assert (cross.name, cross.page_tokens, cross.page_bytes) == ("cross", 16, 8 * 16 * 4096)
    assert full.pages_per_large * 4 == cross.pages_per_large
    full, vision = plan_layout(LLAVA, GIB, page_tokens=8).groups
    assert (vision.name, vision.page_tokens, vision.page_bytes) == ("vision", 8, 8 * 7168)


def test_embeddings_may_wait_in_the_pages_of_keys_and_values() -> None:
    """28 layers of 2 KiB hold an embedding of 7 KiB in every token."""
    (group,) = plan_layout(LLAVA, GIB, embeddings="in-kv").groups
    assert group.holds_embeddings
    assert (group.layers, group.name) == (tuple(range(28)), "full")
    assert not any(group.holds_embeddings for group in plan_layout(LLAVA, GIB).groups)


@pytest.mark.parametrize(
    "host",
    [
        attention(0, heads=1),  # 512 bytes
        [LayerSpec(0, GroupKind.SLIDING, 32, 128, 2, 64)],
        [replace(attention(0, heads=32)[0], model="other")],
        [replace(attention(0, heads=32)[0], required_for_hit=False)],
    ],
)
def test_embeddings_that_fit_in_no_token_are_refused(host: list[LayerSpec]) -> None:
    with pytest.raises(ChangeSomething, match="7168 bytes fits in no token") as told:
        plan_layout([*host, embeddings(1, 3584)], GIB, embeddings="in-kv")
    assert told.value.field == "embeddings"


def test_models_and_drafters_are_groups_of_their_own() -> None:
    layers = [
        *attention(0, 1),
        *(replace(layer, required_for_hit=False) for layer in attention(2)),
        *(replace(layer, model="b") for layer in attention(0, 1)),
    ]
    groups = plan_layout(layers, GIB).groups
    assert [(g.name, g.model, g.required_for_hit) for g in groups] == [
        ("full", "", True),
        ("draft-full", "", False),
        ("b:full", "b", True),
    ]


def test_a_draft_of_like_layers_has_pages_of_its_own() -> None:
    """Layers count from 0 in both models."""
    layers = [*attention(0, 1), *as_draft(attention(0))]
    for manager in MANAGERS:
        groups = plan_layout(layers, GIB, manager=manager).groups
        assert [g.is_draft for g in groups] == [False, True], manager
        assert [g.layers for g in groups] == [(0, 1), (0,)]
        assert all(g.required_for_hit for g in groups)
        assert groups[1].name.startswith("draft-")


def test_manual_splits_memory_between_a_model_and_its_draft() -> None:
    layout = plan_layout(
        [*attention(*range(32)), *as_draft(attention(*range(4), heads=2))], GIB, manager="manual"
    )
    assert layout.quota_large_pages == (496, 16)


def test_manual_splits_target_and_drafter_by_bytes_per_token() -> None:
    """32 layers of 4 KiB and 4 of 1 KiB a token: 32 to 1."""
    draft = [replace(layer, required_for_hit=False) for layer in attention(*range(32, 36), heads=2)]
    layout = plan_layout([*attention(*range(32)), *draft], GIB, manager="manual")
    target, drafter = layout.groups
    assert (target.name, drafter.name) == ("all", "draft-all")
    assert target.page_bytes == 32 * drafter.page_bytes
    assert layout.quota_large_pages is not None
    assert sum(layout.quota_large_pages) == layout.num_large_pages == 512
    assert layout.quota_large_pages == (496, 16)


def test_manual_counts_one_state_for_each_page_of_tokens() -> None:
    """Jamba: seven state pages beside each page of tokens."""
    layout = plan_layout(JAMBA, 3 * GIB, manager="manual")
    quota = dict(zip((g.kind for g in layout.groups), layout.quota_large_pages or (), strict=True))
    assert abs(quota[STATE] - 7 * quota[FULL]) <= 7
    assert sum(quota.values()) == layout.num_large_pages


def test_paged_models_share_the_largest_page() -> None:
    other = [replace(layer, model="b") for layer in attention(0, 1)]
    groups = plan_layout([*attention(*range(8)), *other], GIB, manager="paged").groups
    assert [(g.name, g.padding_bytes) for g in groups] == [("all", 0), ("b:all", 6 * 16 * 4096)]
    assert len({g.page_stride_bytes for g in groups}) == 1


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_every_manager_sizes_every_hybrid(manager: Manager, name: str) -> None:
    layers = HYBRIDS[name]
    layout = plan_layout(layers, 8 * GIB, manager=manager)
    assert sorted(i for g in layout.groups for i in g.layers) == [*range(len(layers))]
    for group in layout.groups:
        assert group.page_stride_bytes * group.pages_per_large == layout.large_page_bytes
        assert group.slices * (group.layers_per_page or len(group.layers)) == len(group.layers)
        assert group.padding_bytes >= 0
    if layout.quota_large_pages is not None:
        assert min(layout.quota_large_pages) > 0
        assert sum(layout.quota_large_pages) <= layout.num_large_pages


def test_a_given_large_page_is_taken_as_it_is() -> None:
    layout = plan_layout(JAMBA, 3 * GIB, large_page_bytes=2 * 3_432_000)
    assert (layout.large_page_bytes, layout.sizing_rule) == (6_864_000, "given")
    assert [group.pages_per_large for group in layout.groups] == [22, 26]


@pytest.mark.parametrize("size", [311_295, 3_432_001])
def test_a_large_page_that_holds_no_page_is_refused(size: int) -> None:
    with pytest.raises(ChangeSomething, match="use at least 311296"):
        plan_layout(JAMBA, 3 * GIB, large_page_bytes=size)
