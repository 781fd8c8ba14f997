"""States inside pages: where their bytes are, and what a fresh request reads."""

import pytest
import torch

from kvell.models.config.state_sizes import StateShapes
from kvell.models.states.state_pages import StatePages, state_pages
from kvell.pages.layout import GroupKind, GroupSpec

SHAPES = StateShapes(channels=6, window=3, recurrent=(2, 4))


def group(layer_bytes: int, layers_per_page: int = 2, padding: int = 16) -> GroupSpec:
    stride = layer_bytes * layers_per_page + padding
    return GroupSpec(
        "state", GroupKind.STATE, (1, 2, 5, 7), layer_bytes, 1, stride, 4,
        layers_per_page=layers_per_page,
    )  # fmt: skip


def pages_of(layer: int, dtype: torch.dtype = torch.float32) -> tuple[StatePages, torch.Tensor]:
    spec = group(18 * dtype.itemsize + 8 * 4)
    pool = torch.full((spec.page_stride_bytes * 12 + 5,), 0xFF, dtype=torch.uint8)
    return state_pages(spec, layer, SHAPES, pool, dtype), pool


def ids(*pages: int) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int32)


def test_a_layer_is_at_its_place_in_its_slice() -> None:
    pages, pool = pages_of(7)
    assert pages.part == 1, "layers 5 and 7 are the second page of a state"
    window, recurrent = torch.randn(2, 6, 3), torch.randn(2, 2, 4)
    pages.store_window(ids(9, 4), window)
    pages.store_recurrent(ids(9, 4), recurrent)
    layer_bytes, stride = 18 * 4 + 8 * 4, 2 * (18 * 4 + 8 * 4) + 16
    stored = pool[9 * stride + layer_bytes : 9 * stride + 2 * layer_bytes].view(torch.float32)
    assert torch.equal(stored, torch.cat((window[0].flatten(), recurrent[0].flatten())))
    assert int((pool != 0xFF).sum()) <= 2 * layer_bytes, "nothing else was touched"


def test_what_was_stored_is_loaded() -> None:
    pages, _ = pages_of(2)
    window, recurrent = torch.randn(3, 6, 3), torch.randn(3, 2, 4)
    pages.store_window(ids(0, 5, 2), window)
    pages.store_recurrent(ids(0, 5, 2), recurrent)
    assert torch.equal(pages.load_window(ids(2, 0), None), window[[2, 0]])
    assert torch.equal(pages.load_recurrent(ids(5, 0), None), recurrent[[1, 0]])


def test_a_fresh_request_starts_from_zero_whatever_its_page_holds() -> None:
    pages, _ = pages_of(1)
    fresh = torch.tensor([True, False])
    assert pages.load_recurrent(ids(3, 3), fresh)[0].abs().max() == 0
    assert pages.load_recurrent(ids(3, 3), fresh)[1].isnan().any(), "the page held NaN"
    assert pages.load_window(ids(3, 3), fresh)[0].abs().max() == 0


def test_loading_is_a_copy() -> None:
    pages, _ = pages_of(1)
    pages.store_recurrent(ids(3), torch.ones(1, 2, 4))
    pages.load_recurrent(ids(3), None).zero_()
    assert pages.load_recurrent(ids(3), None).min() == 1


def test_sixteen_bit_windows_beside_float32_states() -> None:
    pages, _ = pages_of(5, torch.bfloat16)
    assert pages.recurrent is not None
    assert (pages.window.dtype, pages.recurrent.dtype) == (torch.bfloat16, torch.float32)
    values = torch.randn(1, 2, 4)
    pages.store_recurrent(ids(1), values)
    pages.store_window(ids(1), torch.full((1, 6, 3), 1.5))
    assert torch.equal(pages.load_recurrent(ids(1), None), values)
    assert pages.load_window(ids(1), None).eq(1.5).all()


def test_states_of_another_size_are_refused() -> None:
    pool = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(ValueError, match="100 bytes"):
        state_pages(group(100), 1, SHAPES, pool, torch.float32)


def test_states_that_are_not_aligned_are_refused() -> None:
    odd = StateShapes(channels=1, window=3, recurrent=(2,))
    spec, pool = group(3 * 2 + 2 * 4, padding=4), torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(ValueError, match="aligned"):
        state_pages(spec, 1, odd, pool, torch.bfloat16)


def test_a_window_alone() -> None:
    only = StateShapes(channels=8, window=2, recurrent=())
    spec, pool = group(16 * 4), torch.zeros(4096, dtype=torch.uint8)
    assert state_pages(spec, 1, only, pool, torch.float32).recurrent is None
