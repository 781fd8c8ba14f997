"""Every implementation against attention written out densely."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvell.attention.interface import AttentionKernels
from tests.attention.cases import (
    Shape,
    attend,
    dense_attention,
    make_case,
)
from tests.depth import few

RAGGED = ((1, 1), (37, 37), (200, 1), (130, 7), (64, 64), (65, 2))

SHAPES = {
    "grouped heads": Shape(RAGGED),
    "one kv head, wide": Shape(RAGGED, heads=4, kv_heads=1, head_size=256),
    "a kv head each": Shape(RAGGED, heads=4, kv_heads=4, head_size=128),
    "pages of 8": Shape(RAGGED, page_tokens=8),
    "pages of 24": Shape(RAGGED, page_tokens=24),
    "pages larger than a span": Shape(RAGGED, page_tokens=128),
    "head size 80": Shape(RAGGED, heads=4, kv_heads=2, head_size=80),
    "head size 8": Shape(RAGGED, heads=3, kv_heads=1, head_size=8),
    "head size 72": Shape(RAGGED, heads=10, kv_heads=2, head_size=72),
    "many heads to one": Shape(RAGGED, heads=16, kv_heads=1, head_size=32),
    "window": Shape(RAGGED, window_tokens=40),
    "window of one page": Shape(RAGGED, window_tokens=16),
    "window inside a page": Shape(RAGGED, window_tokens=5),
    "window of one token": Shape(RAGGED, window_tokens=1),
    "window over a long context": Shape(((1500, 3), (700, 100)), window_tokens=520),
    "softcap": Shape(RAGGED, softcap=3.0),
    "loose softcap": Shape(RAGGED, softcap=50.0),
    "sinks": Shape(RAGGED, sinks=True),
    "all at once": Shape(RAGGED, window_tokens=33, softcap=5.0, sinks=True, page_tokens=8),
    "chunks": Shape(RAGGED, chunk_tokens=24),
    "chunks of a page": Shape(RAGGED, chunk_tokens=16),
    "chunks inside a page": Shape(RAGGED, chunk_tokens=5),
    "chunks over a long context": Shape(((1500, 3), (700, 100)), chunk_tokens=520),
    "chunks and a window": Shape(RAGGED, chunk_tokens=50, window_tokens=20),
    "latents": Shape(RAGGED, heads=6, kv_heads=1, head_size=72, value_size=64),
    "small latents": Shape(RAGGED, heads=20, kv_heads=1, head_size=24, value_size=8),
    "latents, one query": Shape(RAGGED, heads=1, kv_heads=1, head_size=40, value_size=32),
    "latents of several heads": Shape(RAGGED, heads=4, kv_heads=2, head_size=40, value_size=16),
    "several sections": Shape(((1100, 1), (1025, 1), (1024, 1), (600, 200)), heads=2, kv_heads=1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_float32_is_exact(kernels: AttentionKernels, shape: Shape) -> None:
    case = make_case(shape)
    torch.testing.assert_close(
        attend(kernels, case).double(), dense_attention(case), atol=5e-6, rtol=1e-5
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_bfloat16_is_near_the_exact_result_of_its_inputs(
    kernels: AttentionKernels, shape: Shape
) -> None:
    case = make_case(replace(shape, dtype=torch.bfloat16))
    output, exact = attend(kernels, case), dense_attention(case)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), exact, atol=1e-2, rtol=1e-2)
    error = (output.double() - exact).square().mean().sqrt()
    rounding = (exact.bfloat16().double() - exact).square().mean().sqrt()
    assert error <= 1.6 * rounding


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads = draw(st.integers(1, 3))
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        context = draw(st.integers(1, 180))
        requests.append((context, draw(st.integers(1, context))))
    head_size = 8 * draw(st.integers(1, 17))
    return Shape(
        tuple(requests),
        heads=kv_heads * draw(st.integers(1, 7)),
        kv_heads=kv_heads,
        head_size=head_size,
        value_size=draw(st.just(0) | st.sampled_from(range(8, head_size + 1, 8))),
        pool_dtype=draw(st.sampled_from([None, torch.bfloat16, torch.int8, torch.float8_e4m3fn])),
        page_tokens=draw(st.integers(1, 40)),
        window_tokens=draw(st.just(0) | st.integers(1, 100)),
        softcap=draw(st.sampled_from([0.0, 2.0, 30.0])),
        sinks=draw(st.booleans()),
        chunk_tokens=draw(st.just(0) | st.integers(1, 100)),
        seed=draw(st.integers(0, 100)),
    )


# Its scores are far apart: the sum of 112 products in one chain is off by more than in most.
LOUD = Shape(((1, 1), (135, 1), (180, 1), (67, 31)), 9, 3, head_size=112, page_tokens=1, seed=20)


@given(shape=shapes())
@example(LOUD)
@few()
def test_any_shape(shape: Shape) -> None:
    for implementation in _all_kernels():
        case = make_case(shape)
        torch.testing.assert_close(
            attend(implementation, case).double(), dense_attention(case), atol=1e-5, rtol=1e-5
        )


@given(shape=shapes())
@few()
def test_any_shape_in_bfloat16(shape: Shape) -> None:
    case = make_case(replace(shape, dtype=torch.bfloat16))
    for implementation in _all_kernels():
        torch.testing.assert_close(
            attend(implementation, case).double(), dense_attention(case), atol=2e-2, rtol=2e-2
        )


def test_scores_far_apart_weigh_nothing(kernels: AttentionKernels) -> None:
    case = make_case(Shape(((150, 40),), heads=6, kv_heads=2, head_size=32, dtype=torch.bfloat16))
    loud = replace(case, queries=[queries * 64 for queries in case.queries])
    output, exact = attend(kernels, loud), dense_attention(loud)
    torch.testing.assert_close(output.double(), exact, atol=2e-2, rtol=2e-2)


def _all_kernels() -> Sequence[AttentionKernels]:
    from tests.attention.conftest import implementations

    return implementations()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_keys_and_values_may_be_views(
    kernels: AttentionKernels, dtype: torch.dtype
) -> None:
    case = make_case(Shape(((50, 50),), heads=4, kv_heads=2, dtype=dtype))
    fused = torch.cat([case.queries[0], case.keys[0], case.values[0]], 1)
    views = replace(case, queries=[fused[:, :4]], keys=[fused[:, 4:6]], values=[fused[:, 6:]])
    assert not views.keys[0].is_contiguous()
    assert torch.equal(attend(kernels, views), attend(kernels, case))


def test_no_requests(kernels: AttentionKernels) -> None:
    assert attend(kernels, make_case(Shape(()))).shape == (0, 9, 64)


def test_a_request_without_new_tokens_is_passed_over(kernels: AttentionKernels) -> None:
    case = make_case(Shape(((20, 3), (30, 0), (40, 2))))
    torch.testing.assert_close(
        attend(kernels, case).double(), dense_attention(case), atol=5e-6, rtol=1e-5
    )


def test_large_scores_do_not_overflow(kernels: AttentionKernels) -> None:
    case = make_case(Shape(((100, 10),)))
    loud = replace(case, queries=[case.queries[0] * 1000])
    output = attend(kernels, loud)
    torch.testing.assert_close(output.double(), dense_attention(loud), atol=1e-3, rtol=1e-3)
