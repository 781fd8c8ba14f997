"""What layers, groups and layouts say of themselves."""

import dataclasses

import pytest

from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec, Layout, as_draft

GROUP = GroupSpec(
    "sliding(512)",
    GroupKind.SLIDING,
    layers=(0, 1, 3),
    layer_token_bytes=1024,
    page_tokens=16,
    page_stride_bytes=50_000,
    pages_per_large=5,
    window_tokens=512,
)


def test_a_token_is_k_and_v_of_every_head() -> None:
    assert LayerSpec(0, GroupKind.FULL, kv_heads=8, head_size=128, element_bytes=2).token_bytes == (
        8 * 128 * 2 + 8 * 128 * 2
    )


def test_a_latent_is_stored_once() -> None:
    """DeepSeek: 512 numbers and 64 with positions, for all heads together."""
    assert LayerSpec(0, GroupKind.FULL, 1, 576, 2, tensors=1).token_bytes == 576 * 2


def test_quantised_elements_have_a_scale_for_each_vector() -> None:
    spec = LayerSpec(0, GroupKind.FULL, kv_heads=8, head_size=128, element_bytes=1, scale_bytes=4)
    assert spec.token_bytes == 2 * 8 * (128 + 4)


def test_a_layer_that_reads_anothers_tokens_stores_none() -> None:
    assert LayerSpec(7, GroupKind.FULL, 8, 128, 2, kv_of=3).token_bytes == 0


def test_a_page_holds_the_tokens_of_all_layers_and_then_padding() -> None:
    assert GROUP.layer_page_bytes == 16 * 1024
    assert GROUP.page_bytes == 3 * 16 * 1024
    assert GROUP.padding_bytes == 50_000 - 49_152
    assert GROUP.token_bytes == 3 * 1024


def test_layers_follow_each_other_inside_a_page_by_their_place_in_the_group() -> None:
    assert [GROUP.layer_offset_bytes(layer) for layer in (0, 1, 3)] == [0, 16_384, 32_768]


def test_a_layer_of_another_group_has_no_offset() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        GROUP.layer_offset_bytes(2)


def test_a_layout_knows_the_group_of_each_layer() -> None:
    other = dataclasses.replace(GROUP, name="full", layers=(2,))
    layout = Layout((GROUP, other), 250_000, 4)
    assert [layout.group_of_layer(i) for i in range(4)] == [0, 0, 1, 0]
    with pytest.raises(ValueError, match="layer 4 belongs to no group"):
        layout.group_of_layer(4)


def test_a_layer_of_several_models_is_asked_for_by_model() -> None:
    draft = dataclasses.replace(GROUP, name="draft", layers=(0,), is_draft=True)
    second = dataclasses.replace(GROUP, name="b", layers=(1,), model="b")
    layout = Layout((draft, GROUP, second), 250_000, 4, quota_large_pages=(1, 2, 1))
    with pytest.raises(ValueError, match="several models of the pool have a layer 0"):
        layout.group_of_layer(0)
    assert layout.indices_of() == (1,)
    assert layout.indices_of(is_draft=True) == (0,)
    assert layout.indices_of("b") == (2,)
    own = layout.seen_by()
    assert (own.groups, own.group_of_layer(0), own.pool_bytes) == ((GROUP,), 0, layout.pool_bytes)
    assert layout.seen_by(is_draft=True).groups == (draft,)
    assert layout.seen_by("b").group_of_layer(1) == 0
    assert layout.seen_by("c").groups == ()


def test_layers_of_a_draft_are_marked() -> None:
    layers = [LayerSpec(index, GroupKind.FULL, 1, 64, 2) for index in range(2)]
    assert [layer.is_draft for layer in layers] == [False, False]
    assert as_draft(layers) == tuple(dataclasses.replace(x, is_draft=True) for x in layers)


def test_a_layer_with_attention_and_a_state_is_in_two_groups() -> None:
    state = dataclasses.replace(GROUP, name="state", kind=GroupKind.STATE)
    layout = Layout((state, GROUP), 250_000, 4)
    assert layout.group_of_layer(1) == 1
    assert layout.group_of_layer(1, GroupKind.STATE) == 0
    assert layout.group_of_layer(1, GroupKind.SLIDING) == 1
    with pytest.raises(ValueError, match="layer 1 belongs to no group"):
        layout.group_of_layer(1, GroupKind.FULL)


def test_a_state_alone_is_found_without_its_kind() -> None:
    state = dataclasses.replace(GROUP, kind=GroupKind.STATE)
    assert Layout((state,), 250_000, 4).group_of_layer(3) == 0


def test_slices_of_a_state_follow_each_other() -> None:
    state = GroupSpec("state", GroupKind.STATE, (0, 1, 3, 4), 100, 1, 256, 1, layers_per_page=2)
    assert (state.slices, state.page_bytes, state.padding_bytes) == (2, 200, 56)
    assert [state.layer_offset_bytes(layer) for layer in state.layers] == [0, 100, 0, 100]


def test_a_pool_is_its_large_pages() -> None:
    assert Layout((GROUP,), 250_000, 4).pool_bytes == 1_000_000


def test_specs_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GROUP.page_tokens = 8  # type: ignore[misc]
