"""How weights lie in the memory that the lean pass streams."""

import pytest
import torch

from kvell.models.lean.grouped import Form
from kvell.models.lean.packing import (
    PANEL,
    WeightStore,
    gated,
    item_numbers,
    packed,
    packed_bytes,
    store_bytes,
)

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(32, 8), (33, 6), (7, 10), (96, 64)])
def test_every_number_is_where_the_layout_says(out: int, width: int, dtype: torch.dtype) -> None:
    weight = torch.randn(out, width).to(dtype)
    made, numbers = packed(weight), item_numbers(dtype)
    assert made.is_contiguous()
    assert made.nbytes == packed_bytes((out, width, Form.PLAIN), dtype)
    for row in range(out):
        for column in range(width):
            panel, lane = divmod(row, PANEL)
            item, place = divmod(column, numbers)
            assert made[panel, item, lane, place] == weight[row, column]
    beyond = made.transpose(1, 2).flatten(2).flatten(0, 1)[out:]
    assert beyond.count_nonzero() == 0


def test_an_odd_width_is_filled_up_with_zeros() -> None:
    made = packed(torch.ones(32, 5, dtype=torch.bfloat16))
    assert made.shape == (1, 3, 32, 2)
    assert made[0, 2, :, 1].count_nonzero() == 0


@pytest.mark.parametrize("rows", [16, 32, 20])
def test_gates_and_their_ups_share_a_panel(rows: int) -> None:
    gate, up = torch.arange(rows).float()[:, None] + 1, -(torch.arange(rows).float()[:, None] + 1)
    turns = gated(gate, up)
    assert turns.shape[0] % PANEL == 0
    for row in range(rows):
        panel, lane = divmod(row, PANEL // 2)
        assert turns[panel * PANEL + lane, 0] == row + 1
        assert turns[panel * PANEL + PANEL // 2 + lane, 0] == -(row + 1)
    assert turns.count_nonzero() == 2 * rows
    assert torch.equal(gated(gate[:, 0], up[:, 0]), turns[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_holds_its_matrices_side_by_side(dtype: torch.dtype) -> None:
    shapes = [(40, 6, Form.PLAIN), (32, 64, Form.PLAIN), (3, 2, Form.PLAIN)]
    store = WeightStore(store_bytes(shapes, dtype))
    weights = [torch.randn(out, width).to(dtype) for out, width, _ in shapes]
    made = [store.add(weight) for weight in weights]
    assert store.used_bytes == store_bytes(shapes, dtype)
    for matrix, weight in zip(made, weights, strict=True):
        start = matrix.address - made[0].address
        assert start % 128 == 0
        size = packed_bytes((weight.shape[0], weight.shape[1], Form.PLAIN), dtype)
        there = store._bytes[start : start + size].view(dtype)
        assert torch.equal(there, packed(weight).flatten())
        assert matrix.args == (matrix.address, 0, 0, weight.shape[0], weight.shape[1], 0)


def test_a_bias_is_float32_and_filled_up() -> None:
    store = WeightStore(1 << 16)
    bias = torch.randn(33).bfloat16()
    matrix = store.add(torch.randn(33, 4), bias)
    assert matrix.bias is not None
    assert matrix.bias.shape == (64,)
    assert torch.equal(matrix.bias[:33], bias.float())
    assert matrix.bias[33:].count_nonzero() == 0


def test_a_full_store_says_so() -> None:
    store = WeightStore(store_bytes([(32, 4, Form.PLAIN)], torch.float32))
    store.add(torch.ones(32, 4))
    with pytest.raises(ValueError, match="more than the store's 512"):
        store.add(torch.ones(1, 1))
