"""Activations: granted whole or not at all, never more than there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.elastic.arena import ActivationArena, ActivationModel, LargestNeed, StepBuffers


def test_a_step_needs_its_fixed_part_its_tokens_and_its_logits() -> None:
    model = ActivationModel(fixed_bytes=1000, token_bytes=10, logits_row_bytes=100)
    assert model.need_bytes(0, 0) == 1000
    assert model.need_bytes(32, 2) == 1000 + 320 + 200


def test_a_grant_takes_what_fits_and_a_release_brings_it_back() -> None:
    arena = ActivationArena(100)
    assert arena.grant(60)
    assert not arena.grant(41)
    assert arena.granted_bytes == 60
    assert arena.grant(40)
    arena.release(60)
    arena.release(40)
    assert (arena.granted_bytes, arena.peak_bytes) == (0, 100)


def test_more_cannot_come_back_than_was_granted() -> None:
    arena = ActivationArena(100)
    assert arena.grant(10)
    with pytest.raises(ValueError, match="11 bytes were not granted"):
        arena.release(11)
    assert arena.granted_bytes == 10


@given(st.integers(0, 50), st.lists(st.integers(0, 30), max_size=20))
def test_what_is_granted_is_what_was_not_refused(capacity: int, needs: list[int]) -> None:
    arena, granted = ActivationArena(capacity), 0
    for need in needs:
        fits = granted + need <= capacity
        assert arena.grant(need) is fits
        granted += need if fits else 0
        assert arena.granted_bytes == granted <= capacity
    assert arena.peak_bytes == granted


sizes = st.lists(st.integers(1, 300), max_size=5).map(tuple)
counts = st.integers(0, 100)


@given(sizes, sizes, st.sampled_from([1, 64, 128]), counts, counts)
def test_buffers_lie_one_behind_the_other(
    by_token: tuple[int, ...], by_row: tuple[int, ...], align: int, tokens: int, rows: int
) -> None:
    need = StepBuffers(4 * align, by_token, by_row, align).need_bytes(tokens, rows)
    exact = 4 * align + tokens * sum(by_token) + rows * sum(by_row)
    assert need % align == 0
    assert exact <= need < exact + align * (len(by_token) + len(by_row) + 1)


def test_models_that_take_turns_need_what_the_largest_needs() -> None:
    wide, many = ActivationModel(0, 10, 1), ActivationModel(0, 1, 10)
    need = LargestNeed((wide, many))
    assert need.need_bytes(9, 1) == wide.need_bytes(9, 1) == 91
    assert need.need_bytes(1, 9) == many.need_bytes(1, 9) == 91
