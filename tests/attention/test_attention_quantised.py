"""Pools of another dtype than the queries: bfloat16 or float32 under the other, int8, fp8."""

from dataclasses import replace

import pytest
import torch

from kvell.attention.interface import AttentionKernels
from kvell.attention.quantised import (
    LARGEST,
    dequantise,
    is_quantised,
    quantise,
    scale_bytes_of,
)
from tests.attention.cases import (
    Shape,
    attend,
    dense_attention,
    make_case,
    make_layer,
    new_queries,
    store,
)

RAGGED = ((1, 1), (37, 37), (200, 1), (130, 7), (64, 64), (65, 2))
QUANTISED = tuple(LARGEST)
every_dtype = pytest.mark.parametrize("dtype", QUANTISED)

SHAPES = {
    "grouped heads": Shape(RAGGED),
    "head size 72, pages of 8": Shape(RAGGED, heads=2, kv_heads=2, head_size=72, page_tokens=8),
    "window, cap and sinks": Shape(RAGGED, window_tokens=40, softcap=3.0, sinks=True),
    "chunks": Shape(RAGGED, chunk_tokens=24),
    "latents": Shape(RAGGED, heads=6, kv_heads=1, head_size=72, value_size=64),
    "several sections": Shape(((1100, 1), (600, 200)), heads=2, kv_heads=1),
}


@every_dtype
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_quantised_pools_are_exact_for_what_they_store(
    kernels: AttentionKernels, shape: Shape, dtype: torch.dtype
) -> None:
    case = make_case(replace(shape, pool_dtype=dtype))
    torch.testing.assert_close(
        attend(kernels, case).double(), dense_attention(case), atol=5e-6, rtol=1e-5
    )


@every_dtype
def test_bfloat16_queries_of_quantised_pools(kernels: AttentionKernels, dtype: torch.dtype) -> None:
    case = make_case(Shape(RAGGED, dtype=torch.bfloat16, pool_dtype=dtype))
    output, exact = attend(kernels, case), dense_attention(case)
    assert output.dtype == torch.bfloat16
    error = (output.double() - exact).square().mean().sqrt()
    rounding = (exact.bfloat16().double() - exact).square().mean().sqrt()
    assert error <= 1.6 * rounding


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("latent_size", [0, 48])
def test_plain_pools_of_another_dtype(
    kernels: AttentionKernels, dtype: torch.dtype, pool_dtype: torch.dtype, latent_size: int
) -> None:
    case = make_case(Shape(RAGGED, dtype=dtype, pool_dtype=pool_dtype, value_size=latent_size))
    tolerance = 5e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        attend(kernels, case).double(), dense_attention(case), atol=tolerance, rtol=tolerance
    )


@every_dtype
def test_kernels_store_the_same_bytes(kernels: AttentionKernels, dtype: torch.dtype) -> None:
    shape = Shape(((40, 40),), heads=2, kv_heads=2, head_size=16, pool_dtype=dtype)
    case = make_case(shape)
    stored = store(kernels, case)
    layer, page = stored.layer, int(stored.batch.page_ids[1])
    start = page * layer.page_stride_bytes + layer.layer_offset_bytes
    rows = layer.pool[start : start + layer.page_bytes].view(2, 2, 16, layer.row_bytes)
    for tensor, given in zip(rows, (case.keys[0], case.values[0]), strict=True):
        assert torch.equal(tensor, quantise(given[16:32], dtype).transpose(0, 1))


@every_dtype
def test_partials_of_quantised_pools(kernels: AttentionKernels, dtype: torch.dtype) -> None:
    case = make_case(Shape(RAGGED, pool_dtype=dtype))
    stored = store(kernels, case)
    partial = kernels.attend_partial(
        stored.layer, stored.batch, new_queries(case), case.shape.params
    )
    assert torch.equal(partial.output, attend(kernels, case))


@every_dtype
def test_quantising_keeps_the_largest_number_and_loses_little(dtype: torch.dtype) -> None:
    vectors = torch.randn(50, 3, 64) * 10
    again = dequantise(quantise(vectors, dtype), dtype)
    largest = vectors.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(again.abs().amax(-1, keepdim=True), largest)
    step = 1 / 254 if dtype == torch.int8 else 1 / 16
    assert ((again - vectors).abs() <= step * (largest if dtype == torch.int8 else vectors.abs())
            + 1e-5 * largest).all()  # fmt: skip


@every_dtype
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    assert not dequantise(quantise(torch.zeros(2, 8), dtype), dtype).any()


@every_dtype
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_scales_have_the_range_of_float32(dtype: torch.dtype, size: float) -> None:
    vectors = torch.tensor([[size, -size, size / 2, 0.0]])
    torch.testing.assert_close(
        dequantise(quantise(vectors, dtype), dtype), vectors, rtol=0.01, atol=0
    )


def test_every_fp8_number_is_read_as_torch_reads_it(kernels: AttentionKernels) -> None:
    """One position whose value is all numbers there are: attention gives them back."""
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    finite = numbers.float().nan_to_num(0.0)
    shape = Shape(((1, 1),), heads=1, kv_heads=1, head_size=256, pool_dtype=torch.float8_e4m3fn)
    case = make_case(shape)
    case = replace(case, values=[finite.view(1, 1, 256)])
    assert torch.equal(attend(kernels, case).flatten(), finite)


def test_which_dtypes_carry_a_scale() -> None:
    assert [is_quantised(dtype) for dtype in (torch.int8, torch.float32)] == [True, False]
    assert [scale_bytes_of(dtype) for dtype in (torch.int8, torch.bfloat16)] == [4, 0]
    layer = make_layer(Shape((), head_size=64, kv_heads=3, pool_dtype=torch.int8), pages=2)
    assert (layer.row_bytes, layer.page_bytes) == (68, 2 * 3 * 16 * 68)
