"""Runs of layers whose parts of pages move together: every byte is in one, in the pass's order."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.pages.stages import BY_LAYER, join_stages, num_written, stages_of

FULL = GroupSpec("full", GroupKind.FULL, (0, 3, 4), 8, 4, 120, 2)
SLIDING = GroupSpec("sliding", GroupKind.SLIDING, (1, 2), 8, 4, 80, 3, window_tokens=8)
STATE = GroupSpec("state", GroupKind.STATE, (1,), 80, 1, 80, 3)
GROUPS = (FULL, SLIDING, STATE)
LAYERS = range(5)


def layers_of(group: int, part: tuple[int, int]) -> list[int]:
    spec, (begin, end) = GROUPS[group], part
    return [
        layer
        for place, layer in enumerate(spec.layers)
        if begin <= place * spec.layer_page_bytes and (place + 1) * spec.layer_page_bytes <= end
    ]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 99])
def test_each_layer_is_in_one_stage_and_stages_are_in_order(most: int) -> None:
    found: list[int] = []
    for stage in stages_of(GROUPS, most=most):
        own = sorted(layer for part in stage.parts.items() for layer in layers_of(*part))
        assert own[-1] == stage.last_layer
        assert stage.after_layer == (found[-1] if found else -1)
        found += own
    assert found == list(LAYERS)


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_stages_are_written_with_their_last_layer(most: int) -> None:
    stages = stages_of(GROUPS, most=most)
    for layer in LAYERS:
        done = num_written(stages, layer)
        assert all(stage.last_layer <= layer for stage in stages[:done])
        assert all(stage.last_layer > layer for stage in stages[done:])
    assert num_written(stages, -1) == 0
    assert num_written(stages, LAYERS[-1]) == len(stages)


def test_layers_between_those_of_a_model_write_nothing() -> None:
    """Layers without pages by layer, such as ones that only have a state."""
    stages = stages_of((replace(FULL, layers=(3, 11, 19)), STATE))
    assert [num_written(stages, layer) for layer in (0, 3, 10, 11, 18, 19, 40)] == [
        *(0, 1, 1, 2, 2, 3, 3)
    ]


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 5))
def test_stages_in_a_row_are_one_part_of_each_page(most: int, one: int, other: int) -> None:
    stages = stages_of(GROUPS, most=most)
    begin, end = min(one, other), max(one, other)
    some = stages[begin:end]
    together = join_stages(some)
    assert set(together) == {group for stage in some for group in stage.parts}
    for group, part in together.items():
        own = [
            layer for stage in some for layer in layers_of(group, stage.parts.get(group, (0, 0)))
        ]
        assert layers_of(group, part) == own
        sizes = [b - a for stage in some for g, (a, b) in stage.parts.items() if g == group]
        assert part[1] - part[0] == sum(sizes)


def test_all_stages_together_are_whole_pages() -> None:
    assert join_stages(stages_of(GROUPS)) == {0: (0, FULL.page_bytes), 1: (0, SLIDING.page_bytes)}
    assert join_stages(()) == {}


@pytest.mark.parametrize("kind", sorted(frozenset(GroupKind) - BY_LAYER))
def test_other_kinds_have_no_stages(kind: GroupKind) -> None:
    assert stages_of((replace(FULL, kind=kind),)) == ()


def test_each_model_has_its_own() -> None:
    named = (replace(FULL, model="a"), replace(SLIDING, model="b"))
    assert [list(stage.parts) for stage in stages_of(named, "a", 1)] == [[0]]
    assert [list(stage.parts) for stage in stages_of(named, "b", 1)] == [[1]]
    assert stages_of(named, "c") == ()
