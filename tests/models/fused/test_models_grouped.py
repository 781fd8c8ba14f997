"""Weights of eight and four bits: what they say, and how they lie in memory."""

import pytest
import torch

from kvell.models.fused.grouped import GROUP, Form, GroupedWeight, quantise
from kvell.models.fused.packing import (
    PANEL,
    WeightStore,
    group_bytes,
    interleave_gates,
    item_numbers,
    packed_bytes,
    packed_groups,
    rows_of,
    store_bytes,
)
from kvell.models.fused.weights import join, widen
from tests.models.cases import covering

FORMS = [Form.INT8, Form.INT4]
DTYPES = [torch.float32, torch.bfloat16]
every_form = pytest.mark.parametrize("form", FORMS)


def drawn(out: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(out, width, generator=torch.Generator().manual_seed(seed)) * 0.05


@every_form
@pytest.mark.parametrize("width", [32, 96, 40, 7])
def test_a_number_is_at_most_half_a_step_away(form: Form, width: int) -> None:
    weight = drawn(9, width)
    made = quantise(weight, form)
    assert made.form is form
    assert made.shape == (9, width)
    for start in range(0, width, GROUP):
        part, near = weight[:, start : start + GROUP], made.unpack()[:, start : start + GROUP]
        size = part.abs().amax(1) / 127 if form is Form.INT8 else (part.amax(1) - part.amin(1)) / 15
        assert ((part - near).abs() <= 0.51 * size[:, None] + 1e-4).all()


@every_form
def test_numbers_that_are_of_the_form_stay_as_they_are(form: Form) -> None:
    once = quantise(drawn(8, 64), form).unpack()
    again = quantise(once, form).unpack()
    assert (once - again).abs().max() <= 2e-4 * once.abs().max()


@every_form
@pytest.mark.parametrize("value", [0.0, -0.25, 3.0])
def test_rows_of_one_number(form: Form, value: float) -> None:
    made = quantise(torch.full((2, 40), value), form).unpack()
    assert torch.allclose(made, torch.full((2, 40), value), rtol=1e-3)


@every_form
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e9])
def test_numbers_that_half_precision_cannot_scale_are_refused(form: Form, bad: float) -> None:
    weight = drawn(4, 64)
    weight[2, 40] = bad
    with pytest.raises(ValueError, match="weight"):
        quantise(weight, form)


@covering(
    {"out,width": [(33, 70), (7, 10), (32, 32), (64, 96)], "form": FORMS, "dtype": DTYPES},
    together=1,
)
def test_every_number_is_where_the_layout_says(
    out: int, width: int, form: Form, dtype: torch.dtype
) -> None:
    weight, numbers = quantise(drawn(out, width), form), item_numbers(dtype)
    made = packed_groups(weight, dtype)
    assert made.nbytes == packed_bytes((out, width, form), dtype)
    assert made.shape[2] == group_bytes(form)
    scales = made[..., : 2 * PANEL].contiguous().view(torch.float16)
    header_bytes = 2 * PANEL if form is Form.INT8 else 4 * PANEL
    quants = made[..., header_bytes:].contiguous()
    for row in range(out):
        panel, lane = divmod(row, PANEL)
        for column in range(width):
            group, place = divmod(column, GROUP)
            step, number = place // numbers, lane * numbers + place % numbers
            assert scales[panel, group, lane] == weight.scales[row, group]
            if form is Form.INT8:
                found = quants.view(torch.int8)[panel, group, step * PANEL * numbers + number]
            else:
                words = quants.view(torch.int16)[panel, group]
                word = int(words[step // 4 * PANEL * numbers + number])
                found = torch.tensor(word >> step % 4 * 4 & 15)
            assert found == weight.quants[row, column]


@pytest.mark.parametrize("dtype", DTYPES)
def test_minima_follow_the_scales(dtype: torch.dtype) -> None:
    weight = quantise(drawn(32, 64), Form.INT4)
    assert weight.minima is not None
    made = packed_groups(weight, dtype)[0, :, 2 * PANEL : 4 * PANEL].contiguous()
    assert torch.equal(made.view(torch.float16), weight.minima.T)


@every_form
def test_rows_are_joined_after_they_are_grouped(form: Form) -> None:
    """Joining and taking turns move rows; a group lies inside one."""
    parts = [drawn(20, 64, seed) for seed in range(2)]
    weights = [quantise(part, form) for part in parts]
    for how in (torch.cat, lambda both: interleave_gates(*both)):
        made = join(weights, how)
        assert isinstance(made, GroupedWeight)
        assert torch.equal(made.unpack(), how([one.unpack() for one in weights]))


@every_form
def test_inputs_are_added_at_the_end(form: Form) -> None:
    weight = quantise(drawn(4, 52), form)
    wide = widen(weight, 80)
    assert isinstance(wide, GroupedWeight)
    assert wide.shape == (4, 80)
    assert torch.equal(wide.unpack()[:, :52], weight.unpack())
    assert packed_groups(wide, torch.float32).shape[1] == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_holds_forms_side_by_side(dtype: torch.dtype) -> None:
    shapes = [(40, 64, Form.INT4), (32, 64, Form.PLAIN), (33, 32, Form.INT8)]
    store = WeightStore(store_bytes(shapes, dtype))
    for out, width, form in shapes:
        weight = drawn(out, width).to(dtype)
        made = rows_of([weight]) if form is Form.PLAIN else quantise(weight, form)
        matrix = store.add(made, None, dtype)
        assert matrix.args == (matrix.address, 0, 0, out, width, int(form))
    assert store.used_bytes == store_bytes(shapes, dtype)
