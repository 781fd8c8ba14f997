"""Kernels that store new keys and values in pages, and that copy runs of bytes."""

import triton
import triton.language as tl


@triton.jit
def write_rows(
    pool,
    new,
    token_stride,
    head_stride,
    page_ids,
    offsets,
    page_stride,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store all heads of a token, ROW numbers each, in the row of its page.  Grid (tokens,).

    ``pool`` points at the layer's keys (or values) in page 0; strides count numbers.  A token
    whose page is below 0 is not stored.
    """
    token = tl.program_id(0)
    page = tl.load(page_ids + token).to(tl.int64)
    inside = tl.load(offsets + token)
    number = tl.arange(0, BLOCK)
    head, dim = number // ROW, number % ROW
    there = number < tl.where(page < 0, 0, KV_HEADS * ROW)
    source = new + token.to(tl.int64) * token_stride + head * head_stride + dim
    target = pool + page * page_stride + (head * PAGE_TOKENS + inside) * ROW + dim
    tl.store(target, tl.load(source, mask=there), mask=there)


@triton.jit
def _whole(x):
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _four_bits(x):
    """Round to numbers of e4m3: four significant bits, each at least 2^-9."""
    size = tl.abs(x)
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    large = (exponent + (20 << 23)).to(tl.float32, bitcast=True)
    rounded = (size + large) - large
    return tl.where(x < 0, -rounded, rounded)


@triton.jit
def write_quantised(
    pool,
    scales,
    new,
    token_stride,
    head_stride,
    page_ids,
    offsets,
    page_stride,
    scale_stride,
    LARGEST: tl.constexpr,
    WHOLE: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store one vector divided by its scale, then the scale.  Grid (tokens, kv heads).

    The arithmetic is that of ``quantise``: correctly rounded divisions, ties to even.  To round,
    add a number so large that the sum has no bits for the rest, and subtract it again.  A token
    whose page is below 0 is not stored.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    page = tl.load(page_ids + token).to(tl.int64)
    row = head * PAGE_TOKENS + tl.load(offsets + token)
    dims = tl.arange(0, BLOCK)
    source = new + token.to(tl.int64) * token_stride + head * head_stride + dims
    exact = tl.load(source, mask=dims < SIZE, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(exact), 0), LARGEST * 1.0)
    steps = tl.div_rn(exact, tl.where(scale == 0.0, 1.0, scale))
    steps = tl.minimum(tl.maximum(steps, -LARGEST * 1.0), LARGEST * 1.0)
    steps = _whole(steps) if WHOLE else _four_bits(steps)
    target = pool + page * page_stride + row * (SIZE + 4) + dims
    size = tl.where(page < 0, 0, SIZE)
    tl.store(target, steps.to(pool.dtype.element_ty), mask=dims < size)
    tl.store(scales + page * scale_stride + row * ((SIZE + 4) // 4), scale, mask=page >= 0)
