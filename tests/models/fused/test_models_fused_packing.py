"""How weights lie in the memory that the fused pass streams."""

import pytest
import torch

from kvell.models.fused.grouped import Form
from kvell.models.fused.packing import (
    PANEL,
    Rows,
    WeightStore,
    interleave_gates,
    item_numbers,
    packed_bytes,
    rows_of,
    store_bytes,
)
from tests.models.fused.by_hand import OneLayer
from tests.models.fused_models import MARKED_SETS
from tests.models.rounding import DENORMALS_ARE_ZEROS, bits_of, hard_numbers, rounded_bits

pytest.importorskip("kvell.models.fused._packing")
DTYPES = [torch.float32, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def bytes_of(store: WeightStore) -> torch.Tensor:
    return store._bytes


def packed(rows: Rows, dtype: torch.dtype, num_threads: int = 1) -> torch.Tensor:
    """A weight by panels, as the store has it: [panels, items, 32, numbers of an item]."""
    size = packed_bytes((*rows.shape, Form.PLAIN), dtype)
    store = WeightStore(size)
    bytes_of(store).fill_(0x55)
    store.add(rows, dtype=dtype, num_threads=num_threads)
    return (
        bytes_of(store)[:size]
        .view(dtype)
        .view(-(-rows.shape[0] // PANEL), -1, PANEL, item_numbers(dtype))
    )


def by_panels(weight: torch.Tensor) -> torch.Tensor:
    """The same in torch's words."""
    numbers = item_numbers(weight.dtype)
    rows, width = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -width % numbers, 0, -rows % PANEL))
    panels = filled.view(-1, PANEL, filled.shape[1] // numbers, numbers)
    return panels.transpose(1, 2).contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(32, 8), (33, 6), (7, 10), (96, 64)])
def test_every_number_is_where_the_layout_says(out: int, width: int, dtype: torch.dtype) -> None:
    weight = torch.randn(out, width).to(dtype)
    made, numbers = packed(rows_of([weight]), dtype), item_numbers(dtype)
    assert made.nbytes == packed_bytes((out, width, Form.PLAIN), dtype)
    for row in range(out):
        for column in range(width):
            panel, lane = divmod(row, PANEL)
            item, place = divmod(column, numbers)
            assert made[panel, item, lane, place] == weight[row, column]
    beyond = made.transpose(1, 2).flatten(2).flatten(0, 1)[out:]
    assert beyond.count_nonzero() == 0


@pytest.mark.parametrize("source", DTYPES)
@every_dtype
@pytest.mark.parametrize("num_threads", [1, 3])
def test_numbers_are_rounded_as_torch_rounds_them(
    source: torch.dtype, dtype: torch.dtype, num_threads: int
) -> None:
    """Ties, the largest numbers, infinities and what is not a number among them."""
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (515, 70), generator=torch.manual_seed(3))
    weight = bits.to(torch.int32).view(torch.float32).to(source)
    ties = torch.tensor([1.00390625, 1.01171875, 3.4e38, float("inf"), -0.0, 1e-40])
    weight[0, :6] = ties.to(source)
    made = packed(rows_of([weight]), dtype, num_threads)
    assert torch.equal(made.nan_to_num(7.5), by_panels(weight.to(dtype)).nan_to_num(7.5))
    assert torch.equal(made.isnan(), by_panels(weight.to(dtype)).isnan())


def test_what_is_no_number_keeps_its_sign() -> None:
    weight = hard_numbers().view(1, -1)
    made = packed(rows_of([weight]), torch.bfloat16)[0, :, 0].flatten()
    assert torch.equal(bits_of(made), rounded_bits(weight[0]))


@every_dtype
def test_rows_of_several_lie_as_they_are_joined(dtype: torch.dtype) -> None:
    a, b = torch.randn(21, 12).to(dtype), torch.randn(21, 12).to(dtype)
    for join in (torch.cat, lambda both: interleave_gates(*both)):
        made = packed(rows_of([a, b], join), dtype)
        assert torch.equal(made, by_panels(join([a, b])))


@every_dtype
def test_a_wider_row_ends_in_zeros(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 10).to(dtype)
    rows = rows_of([weight])
    made = packed(Rows(rows.addresses, rows.parts, 16), dtype)
    assert torch.equal(made, by_panels(torch.nn.functional.pad(weight, (0, 6))))


def test_rows_that_are_not_contiguous_are_taken_as_they_read() -> None:
    turned = torch.randn(8, 40).t()
    assert torch.equal(packed(rows_of([turned]), torch.float32), by_panels(turned.contiguous()))


def test_what_is_packed_together_has_one_width_and_one_dtype() -> None:
    wide, narrow = torch.zeros(4, 8), torch.zeros(4, 6)
    for other in (narrow, wide.bfloat16()):
        with pytest.raises(ValueError, match="one width and one dtype"):
            rows_of([wide, other])


def test_the_compiled_module_refuses_what_would_not_fit() -> None:
    from kvell.models.fused import _packing

    addresses, out = torch.zeros(1, dtype=torch.int64), torch.zeros(64, dtype=torch.uint8)
    places = (addresses.data_ptr(), 1, 9)
    with pytest.raises(ValueError, match="wider than what they are packed to"):
        _packing.pack_rows(*places, 4, 0, 1, out.data_ptr(), 1)
    with pytest.raises(ValueError, match="no such element"):
        _packing.pack_rows(*places, 16, 2, 0, out.data_ptr(), 1)


def test_an_odd_width_is_filled_up_with_zeros() -> None:
    made = packed(rows_of([torch.ones(32, 5, dtype=torch.bfloat16)]), torch.bfloat16)
    assert made.shape == (1, 3, 32, 2)
    assert made[0, 2, :, 1].count_nonzero() == 0


@pytest.mark.parametrize("rows", [16, 32, 20])
def test_gates_and_their_ups_share_a_panel(rows: int) -> None:
    gate, up = torch.arange(rows).float()[:, None] + 1, -(torch.arange(rows).float()[:, None] + 1)
    turns = interleave_gates(gate, up)
    assert turns.shape[0] % PANEL == 0
    for row in range(rows):
        panel, lane = divmod(row, PANEL // 2)
        assert turns[panel * PANEL + lane, 0] == row + 1
        assert turns[panel * PANEL + PANEL // 2 + lane, 0] == -(row + 1)
    assert turns.count_nonzero() == 2 * rows
    assert torch.equal(interleave_gates(gate[:, 0], up[:, 0]), turns[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_holds_its_matrices_side_by_side(dtype: torch.dtype) -> None:
    shapes = [(40, 6, Form.PLAIN), (32, 64, Form.PLAIN), (3, 2, Form.PLAIN)]
    store = WeightStore(store_bytes(shapes, dtype))
    weights = [torch.randn(out, width).to(dtype) for out, width, _ in shapes]
    made = [store.add(rows_of([weight]), dtype=dtype) for weight in weights]
    assert store.used_bytes == store_bytes(shapes, dtype)
    for matrix, weight in zip(made, weights, strict=True):
        start = matrix.address - made[0].address
        assert start % 128 == 0
        size = packed_bytes((weight.shape[0], weight.shape[1], Form.PLAIN), dtype)
        there = bytes_of(store)[start : start + size].view(dtype)
        assert torch.equal(there, by_panels(weight).flatten())
        assert matrix.args == (matrix.address, 0, 0, weight.shape[0], weight.shape[1], 0)


def test_a_bias_is_float32_and_filled_up() -> None:
    store = WeightStore(1 << 16)
    bias = torch.randn(33).bfloat16()
    matrix = store.add(rows_of([torch.randn(33, 4)]), bias)
    assert matrix.bias is not None
    assert matrix.bias.shape == (64,)
    assert torch.equal(matrix.bias[:33], bias.float())
    assert matrix.bias[33:].count_nonzero() == 0


def test_a_full_store_says_so() -> None:
    store = WeightStore(store_bytes([(32, 4, Form.PLAIN)], torch.float32))
    store.add(rows_of([torch.ones(32, 4)]))
    with pytest.raises(ValueError, match="more than the store's 512"):
        store.add(rows_of([torch.ones(1, 1)]))


pytest.importorskip("kvell.models.fused._forward", reason="these tests are of compiled code")


@pytest.mark.parametrize("instruction_set", MARKED_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_in_a_page_are_rounded_to_nearest(instruction_set: str, dtype: torch.dtype) -> None:
    """Ties go to even, what is too large becomes infinite, a NaN keeps its sign."""
    values = hard_numbers()
    layer = OneLayer(instruction_set, dtype, torch.bfloat16, values)
    expected = rounded_bits(values, instruction_set in DENORMALS_ARE_ZEROS)
    assert torch.equal(bits_of(layer.run(3)), expected.expand(3, -1))


@pytest.mark.parametrize("instruction_set", MARKED_SETS)
def test_values_of_pages_in_float32_are_not_rounded(instruction_set: str) -> None:
    values = hard_numbers()
    layer = OneLayer(instruction_set, torch.float32, torch.float32, values)
    stored = layer.run(1)[0]
    assert torch.equal(stored.nan_to_num(7.5), values.nan_to_num(7.5))
