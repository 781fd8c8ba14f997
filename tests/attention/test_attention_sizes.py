"""Head sizes that compiled kernels do not take, in the kernels that stand in for them."""

import pytest
import torch

from kvell.attention.choice import kernels_for
from kvell.attention.portable import PortableKernels
from tests.attention.cases import Shape, attend, dense_attention, make_case
from tests.attention.conftest import implementations

RAGGED = ((37, 37), (130, 1), (65, 2))


@pytest.mark.parametrize("size", [2, 10, 18, 50])
@pytest.mark.parametrize("pool_dtype", [None, torch.int8, torch.bfloat16])
def test_portable_kernels_take_any_size(size: int, pool_dtype: torch.dtype | None) -> None:
    case = make_case(Shape(RAGGED, 4, 2, size, pool_dtype=pool_dtype))
    torch.testing.assert_close(
        attend(PortableKernels(), case).double(), dense_attention(case), atol=5e-6, rtol=1e-5
    )


@pytest.mark.parametrize("size", [2, 10, 12, 50])
def test_a_size_is_taken_exactly_or_left_to_portable_kernels(size: int) -> None:
    for kernels in implementations():
        assert kernels_for(kernels, [64, size], torch.float32).name == "portable"
        assert kernels_for(kernels, [64, 8, 0], torch.float32) is kernels
