"""Values are rounded to bfloat16 in one way, whichever instruction set computes them."""

import pytest
import torch

from tests.models.fused_models import MARKED_SETS
from tests.models.rounding import DENORMALS_ARE_ZEROS, bits_of, hard_numbers, rounded_bits

pytest.importorskip("kvell.models.fused._forward", reason="these tests are of compiled code")

from tests.models.fused.by_hand import OneLayer


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
