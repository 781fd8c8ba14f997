"""A second model's pages in a large page that keeps its size."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething
from kvell.pages.grouping import ALIGNMENT_BYTES
from kvell.pages.layout import GroupKind, LayerSpec
from kvell.pages.registering import (
    MAX_REGISTERED_PADDING,
    PAGE_TOKENS_CHOICES,
    padding_of,
    plan_groups_into,
)
from kvell.pages.sizing import MAX_PADDING, plan_layout
from kvell.vocabulary import GIB
from tests.depth import few

SERVED = [LayerSpec(i, GroupKind.FULL, 8, 128, 2) for i in range(32)]
"""Llama 3 8B: pages and large pages of 2 MiB."""


def second(count: int, heads: int, size: int = 128) -> list[LayerSpec]:
    return [LayerSpec(i, GroupKind.FULL, heads, size, 2, model="b") for i in range(count)]


def recurrent(count: int, size: int) -> list[LayerSpec]:
    return [
        LayerSpec(i, GroupKind.STATE, 0, 0, 2, state_bytes=size, model="b") for i in range(count)
    ]


def test_a_model_whose_page_divides_keeps_its_tokens() -> None:
    (group,) = plan_groups_into(2 << 20, second(16, 8))
    assert (group.name, group.model) == ("b:full", "b")
    assert (group.page_tokens, group.pages_per_large, group.padding_bytes) == (16, 2, 0)


def test_a_page_bends_to_the_large_page_by_its_tokens() -> None:
    """28 layers of 2 KiB: 16 tokens fit twice with 14 % to spare, 24 once less; 36 fill it."""
    (group,) = plan_groups_into(2 << 20, second(28, 4), (16, 24, 36))
    assert (group.page_tokens, group.pages_per_large) == (36, 1)
    assert group.padding_bytes == (2 << 20) - 36 * 28 * 2048
    assert padding_of(group) <= MAX_REGISTERED_PADDING


def test_the_first_choice_that_fits_is_taken() -> None:
    assert plan_groups_into(2 << 20, second(16, 8), (8, 16))[0].page_tokens == 8


def test_states_bend_by_their_layers() -> None:
    """Seven states of 144 KiB: all in one page take 1,008 KiB, half of the large page."""
    (group,) = plan_groups_into(2 << 20, recurrent(7, 144 << 10))
    assert (group.layers_per_page, group.slices, group.pages_per_large) == (7, 1, 2)
    (single,) = plan_groups_into(2 << 20, recurrent(7, 250 << 10))
    assert (single.layers_per_page, single.slices, single.pages_per_large) == (1, 7, 8)


def test_layers_that_store_nothing_of_their_own_need_no_page() -> None:
    reader = LayerSpec(2, GroupKind.FULL, 8, 128, 2, kv_of=0, model="b")
    (group,) = plan_groups_into(2 << 20, [*second(2, 8), reader])
    assert group.layers == (0, 1)
    with pytest.raises(ChangeSomething, match="stores no KV cache"):
        plan_groups_into(2 << 20, [reader])


def test_drafters_and_targets_are_named_apart() -> None:
    layers = [*second(2, 8), *(replace(x, index=9, required_for_hit=False) for x in second(1, 8))]
    assert [g.name for g in plan_groups_into(2 << 20, layers)] == ["b:full", "b:draft-full"]


def named_size(error: ChangeSomething) -> int:
    found = re.search(r"large page of (\d+) bytes", error.remedy)
    assert found is not None, error.remedy
    return int(found[1])


def test_a_refusal_names_the_size_that_serves_both() -> None:
    """A state of 1.2 MiB wastes 0.8 MiB of a 2 MiB page; 5 of them and 3 pages meet at 6 MiB."""
    layers = recurrent(5, 1_258_240)
    pool = plan_layout(SERVED, 16 * GIB)
    assert pool.large_page_bytes == 2 << 20
    with pytest.raises(ChangeSomething, match="pages of b:state with at most 5%") as told:
        plan_groups_into(pool.large_page_bytes, layers, beside=pool.groups)
    assert (told.value.field, told.value.value) == ("large_page_bytes", 2 << 20)
    size = named_size(told.value)
    assert size == 3 * (2 << 20)
    again = plan_layout(SERVED, 16 * GIB, large_page_bytes=size)
    assert padding_of(again.groups[0]) <= MAX_PADDING
    assert padding_of(plan_groups_into(size, layers)[0]) <= MAX_REGISTERED_PADDING


def test_without_the_pools_groups_the_size_is_a_multiple() -> None:
    with pytest.raises(ChangeSomething) as told:
        plan_groups_into(2 << 20, recurrent(5, 1_258_240))
    size = named_size(told.value)
    assert size > 2 << 20
    assert size % (2 << 20) == 0
    assert padding_of(plan_groups_into(size, recurrent(5, 1_258_240))[0]) <= MAX_REGISTERED_PADDING


def test_a_page_larger_than_the_large_page_is_refused() -> None:
    with pytest.raises(ChangeSomething, match="b:full"):
        plan_groups_into(4096, second(64, 8))


def test_what_nothing_in_reach_serves_wants_a_pool_of_its_own() -> None:
    """Pages of 997 and 600 cache lines: no size from 997 to 1,060 lines holds both tightly."""
    with pytest.raises(ChangeSomething, match="a pool of its own"):
        plan_groups_into(64, [*recurrent(1, 64 * 997), *recurrent(1, 64 * 600)])


any_model = st.lists(
    st.one_of(
        st.tuples(st.just(GroupKind.FULL), st.integers(1, 16), st.sampled_from([64, 80, 128, 256])),
        st.tuples(st.just(GroupKind.SLIDING), st.integers(1, 16), st.sampled_from([64, 96, 128])),
        st.tuples(st.just(GroupKind.STATE), st.integers(1, 64), st.integers(1, 40_000)),
    ),
    min_size=1,
    max_size=40,
).map(
    lambda shapes: [
        LayerSpec(i, kind, 0, 0, 2, state_bytes=a * b, model="b")
        if kind is GroupKind.STATE
        else LayerSpec(i, kind, a, b, 2, 512 * (kind is GroupKind.SLIDING), model="b")
        for i, (kind, a, b) in enumerate(shapes)
    ]
)


@given(any_model, st.integers(1, 1 << 19).map(lambda n: n * ALIGNMENT_BYTES))
def test_groups_divide_the_large_page_with_little_padding_or_are_refused(
    layers: list[LayerSpec], large_page_bytes: int
) -> None:
    try:
        groups = plan_groups_into(large_page_bytes, layers)
    except ChangeSomething as error:
        assert error.field == "large_page_bytes"
        if "bytes" in error.remedy:
            groups = plan_groups_into(large_page_bytes := named_size(error), layers)
        else:
            return
    assert sorted(i for g in groups for i in g.layers) == list(range(len(layers)))
    assert len({g.name for g in groups}) == len(groups)
    for group in groups:
        assert group.page_stride_bytes * group.pages_per_large == large_page_bytes
        assert group.page_stride_bytes % ALIGNMENT_BYTES == 0
        assert 0 <= padding_of(group) <= MAX_REGISTERED_PADDING
        is_state = group.kind is GroupKind.STATE
        assert group.page_tokens in ((1,) if is_state else PAGE_TOKENS_CHOICES)
        assert len(group.layers) % (group.layers_per_page or 1) == 0


@few()
@given(any_model, any_model)
def test_the_size_named_serves_both(ours: list[LayerSpec], theirs: list[LayerSpec]) -> None:
    served = [replace(layer, model="") for layer in ours]
    pool = plan_layout(served, 16 * GIB)
    try:
        plan_groups_into(pool.large_page_bytes, theirs, beside=pool.groups)
    except ChangeSomething as error:
        if "bytes" not in error.remedy:
            return
        size = named_size(error)
        both = plan_layout([*served, *theirs], size, large_page_bytes=size)
        plan_groups_into(size, theirs)
        # A page that is aligned to cache lines has up to 63 bytes more than it holds.
        for group in both.groups:
            assert group.padding_bytes <= MAX_PADDING * (group.page_bytes + 64) + 64
