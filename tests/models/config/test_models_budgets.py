"""Budgets of token dropping: the pyramid, and layers that take one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.errors import ChangeSomething
from kvell.models.config.budgets import OBSERVED_TOKENS, budgets_of, pyramid_budgets, with_budgets
from kvell.pages.layout import GroupKind, LayerSpec
from kvell.pages.sizing import plan_layout
from kvell.vocabulary import GIB

FULL = [LayerSpec(i, GroupKind.FULL, 8, 128, 2) for i in range(4)]


def test_a_pyramid_by_hand() -> None:
    """Mean 100, depth 10: 10 at the top, 190 at the bottom, 60 between neighbours."""
    assert pyramid_budgets(4, 100, depth=10) == (190, 130, 70, 10)


def test_recent_tokens_are_kept_everywhere() -> None:
    assert pyramid_budgets(4, 108, recent_tokens=8, depth=10) == (198, 138, 78, 18)


def test_one_layer_keeps_the_mean() -> None:
    assert pyramid_budgets(1, 64) == (64,)


@given(st.integers(1, 100), st.integers(1, 5000), st.integers(0, 64), st.integers(1, 50))
def test_budgets_fall_and_keep_their_mean(
    layers: int, chosen: int, recent: int, depth: int
) -> None:
    budgets = pyramid_budgets(layers, chosen + recent, recent_tokens=recent, depth=depth)
    assert len(budgets) == layers
    assert list(budgets) == sorted(budgets, reverse=True)
    assert min(budgets) > recent
    assert abs(sum(budgets) - layers * (chosen + recent)) <= layers
    steps = {a - b for a, b in pairwise(budgets)}
    assert not steps or max(steps) - min(steps) <= 1


@pytest.mark.parametrize(("layers", "mean", "recent"), [(0, 10, 0), (4, 0, 0), (4, 8, 8)])
def test_a_pyramid_of_nothing_is_refused(layers: int, mean: int, recent: int) -> None:
    with pytest.raises(ChangeSomething, match="leaves no token"):
        pyramid_budgets(layers, mean, recent_tokens=recent)


def test_layers_with_a_budget_drop_and_others_do_not() -> None:
    layers = with_budgets(FULL, {0: 512, 1: 256})
    assert [(layer.kind, layer.window_tokens) for layer in layers] == [
        (GroupKind.DROPPING, 512),
        (GroupKind.DROPPING, 256),
        (GroupKind.FULL, 0),
        (GroupKind.FULL, 0),
    ]
    assert {layer.token_bytes for layer in layers} == {4096}


def test_every_budget_is_a_group_of_its_own() -> None:
    groups = plan_layout(with_budgets(FULL, {0: 512, 1: 256, 2: 256}), GIB).groups
    assert [(group.name, group.layers) for group in groups] == [
        ("dropping(512)", (0,)),
        ("dropping(256)", (1, 2)),
        ("full", (3,)),
    ]


@pytest.mark.parametrize(
    ("budgets", "problem"),
    [
        ({7: 10}, "layer 7: is not a layer"),
        ({0: 10}, "layer 0: is not a layer"),
        ({2: 0}, "keep 0"),
    ],
)
def test_budgets_that_no_layer_can_take(budgets: dict[int, int], problem: str) -> None:
    layers = [
        LayerSpec(0, GroupKind.SLIDING, 8, 128, 2, 64),
        LayerSpec(1, GroupKind.FULL, 8, 128, 2, kv_of=2),
        LayerSpec(2, GroupKind.FULL, 8, 128, 2),
    ]
    with pytest.raises(ChangeSomething, match=problem):
        with_budgets(layers, budgets)


def test_the_state_beside_attention_keeps_its_kind() -> None:
    state = LayerSpec(0, GroupKind.STATE, 0, 0, 2, state_bytes=64)
    layers = with_budgets([FULL[0], state], {0: 32})
    assert [layer.kind for layer in layers] == [GroupKind.DROPPING, GroupKind.STATE]


MIXED = [
    LayerSpec(0, GroupKind.SLIDING, 8, 128, 2, 64),
    LayerSpec(1, GroupKind.FULL, 8, 128, 2),
    LayerSpec(2, GroupKind.STATE, 0, 0, 2, state_bytes=64),
    LayerSpec(3, GroupKind.FULL, 8, 128, 2),
    LayerSpec(4, GroupKind.FULL, 8, 128, 2, kv_of=3),
]


def test_a_budget_is_for_layers_of_full_attention_with_tokens_of_their_own() -> None:
    assert budgets_of(MIXED, "512") == {1: 512, 3: 512}


def test_a_pyramid_over_them_keeps_its_mean() -> None:
    budgets = budgets_of(FULL, "pyramid:108")
    assert tuple(budgets.values()) == pyramid_budgets(4, 108, recent_tokens=OBSERVED_TOKENS)
    assert sum(budgets.values()) == 4 * 108
    assert budgets_of(MIXED, "pyramid:108") == {1: 203, 3: 13}


@pytest.mark.parametrize(
    ("budget", "problem"),
    [
        ("", "is not a budget"),
        ("many", "is not a budget"),
        ("-5", "is not a budget"),
        ("512 ", "is not a budget"),
        ("cone:512", "is not a budget"),
        ("pyramid:", "is not a budget"),
        ("8", "keeps no token besides the last 8, which always stay"),
        ("pyramid:0", "keeps no token"),
    ],
)
def test_budgets_that_are_none(budget: str, problem: str) -> None:
    with pytest.raises(ChangeSomething, match=problem) as caught:
        budgets_of(FULL, budget)
    assert (caught.value.field, caught.value.value) == ("--kv-budget", budget)


def test_the_smallest_budgets() -> None:
    assert set(budgets_of(FULL, "9").values()) == {9}
    assert min(budgets_of(FULL, "pyramid:9").values()) == 9


def test_a_model_that_has_nothing_to_drop_from() -> None:
    with pytest.raises(ChangeSomething, match="no layers of full attention"):
        budgets_of(MIXED[:1], "512")
