"""Attention of a tile of query rows to one span of positions: the loop body of both kernels.

A tile has M rows, each a (token, head) of one kv head; a span has N positions, counted
from position 0.  The softmax runs online, in base 2: ``maximum`` is log2(e) × the largest
score so far, ``denominator`` the sum of 2^(score - maximum).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(float("-inf"))


@triton.jit
def first_readable(position, window, chunk):
    """Compute ``AttendParams.first_readable``; without window or chunk, these are very large."""
    return tl.maximum(tl.maximum(position - window + 1, position - position % chunk), 0)


@triton.jit
def _rows_of(
    pool,
    rows,
    dims,
    stored,
    MASKED: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Load [N, BLOCK] numbers of the pool at element offsets ``rows``; 0 if none is stored."""
    where = pool + rows[:, None] + dims[None, :]
    BLOCK: tl.constexpr = dims.shape[0]
    if MASKED:
        return tl.load(where, mask=stored[:, None] & (dims < LENGTH)[None, :], other=0.0)
    if BLOCK != LENGTH:
        return tl.load(where, mask=(dims < LENGTH)[None, :], other=0.0)
    return tl.load(where)


@triton.jit
def _load_query(rows, used, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load [M, BLOCK] numbers of a tile's query rows; 0 past a row's length, in unused rows."""
    dims = tl.arange(0, BLOCK)
    return tl.load(
        rows[:, None] + dims[None, :], mask=used[:, None] & (dims < LENGTH)[None, :], other=0.0
    )


@triton.jit
def tile_of(
    query,
    token_stride,
    head_stride,
    first_row,
    first_own,
    count,
    kv_head,
    part,
    window,
    chunk,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PART_HEADS: tl.constexpr,
    M: tl.constexpr,
):
    """Load the rows of ``count`` tokens: token, head, whether used, positions, query, its rest."""
    row = tl.arange(0, M)
    token = row // PART_HEADS
    head_of_group = part * PART_HEADS + row % PART_HEADS
    head = kv_head * GROUP + head_of_group
    used = (token < count) & (head_of_group < GROUP)
    own = first_own + token
    lowest = first_readable(own, window, chunk)
    rows = query + ((first_row + token).to(tl.int64) * token_stride + head * head_stride)
    q = _load_query(rows, used, SIZE, SIZE_BLOCK)
    q_rest = q
    if REST > 0:
        q_rest = _load_query(rows + SIZE, used, REST, REST_BLOCK)
    return token, head, used, own, lowest, q, q_rest


@triton.jit
def finish(
    outputs,
    maxima,
    denominators,
    sinks,
    at,
    head,
    used,
    maximum,
    denominator,
    output,
    HAS_SINKS: tl.constexpr,
    PARTIAL: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    """Store a tile's normalised rows at [token, head] index ``at``, with sinks or as a partial."""
    if PARTIAL:
        tl.store(maxima + at, maximum / LOG2_E, mask=used)
        tl.store(denominators + at, denominator, mask=used)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0) * LOG2_E
        kept = tl.maximum(maximum, sink)
        shrink = tl.exp2(maximum - kept)
        denominator = denominator * shrink + tl.exp2(sink - kept)
        output = output * shrink[:, None]
    divided = output / tl.where(denominator == 0.0, 1.0, denominator)[:, None]
    dims = tl.arange(0, SIZE_BLOCK)
    tl.store(
        outputs + at[:, None] * SIZE + dims[None, :],
        divided.to(outputs.dtype.element_ty),
        mask=used[:, None] & (dims < SIZE)[None, :],
    )


@triton.jit
def _tanh(x):
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    tanh = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -tanh, tanh)


@triton.jit
def attend_span(
    maximum,
    denominator,
    output,
    query,
    query_rest,
    position,
    own,
    lowest,
    begin,
    end,
    table,
    keys,
    values,
    key_scales,
    value_scales,
    page_stride,
    scale_stride,
    scale,
    softcap,
    MASKED: tl.constexpr,
    SPOILS: tl.constexpr,
    CAPPED: tl.constexpr,
    QUANTISED: tl.constexpr,
    LATENT: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    """Add positions ``position … position+N-1`` to a tile's running softmax.

    ``query`` is [M, BLOCK] with BLOCK ≥ SIZE.  SIZE is the length of a key; of a latent, the
    length of its value, and ``query_rest`` [M, REST_BLOCK] is for the REST numbers after it.
    ``keys`` points at a kv head's first row in page 0, ``table`` at the entry of page position 0.
    An unmasked span is stored whole, and every row reads all of it.  In a masked one a value that
    is no number spoils every row; with SPOILS only the rows that read it, which takes registers.
    """
    offsets = position + tl.arange(0, N)
    stored = (offsets >= begin) & (offsets < end)
    if MASKED:
        pages = tl.load(table + offsets // PAGE_TOKENS, mask=stored, other=0)
    else:
        pages = tl.load(table + offsets // PAGE_TOKENS)
    inside = offsets % PAGE_TOKENS
    rows = pages.to(tl.int64) * page_stride + inside * ROW
    dims = tl.arange(0, query.shape[1])
    key = _rows_of(keys, rows, dims, stored, MASKED, SIZE).to(query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if REST > 0:
        behind = tl.arange(0, REST_BLOCK)
        rest = _rows_of(keys + SIZE, rows, behind, stored, MASKED, REST).to(query.dtype)
        scores = tl.dot(query_rest, tl.trans(rest), acc=scores, input_precision="ieee")
    if QUANTISED:
        scale_rows = pages.to(tl.int64) * scale_stride + inside * (ROW // 4)
        if MASKED:
            key_scale = tl.load(key_scales + scale_rows, mask=stored, other=0.0)
        else:
            key_scale = tl.load(key_scales + scale_rows)
        scores = scores * key_scale[None, :]
    factor = scale * LOG2_E
    if CAPPED:
        scores = _tanh(scores * (scale / softcap))
        factor = softcap * LOG2_E
    if MASKED:
        readable = (offsets[None, :] <= own[:, None]) & (offsets[None, :] >= lowest[:, None])
        scores = tl.where(readable & stored[None, :], scores, NOWHERE)
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)
    shift = new_maximum
    if MASKED:
        shift = tl.where(new_maximum == NOWHERE, 0.0, new_maximum)
    # One product and one difference, masked or not, so that both round the same.
    weights = tl.exp2(scores * factor - shift[:, None])
    shrink = tl.exp2(maximum - shift)
    denominator = denominator * shrink + tl.sum(weights, 1)
    output = output * shrink[:, None]
    if LATENT:
        value = key
        if QUANTISED:
            weights = weights * key_scale[None, :]
    else:
        value = _rows_of(values, rows, dims, stored, MASKED, SIZE).to(query.dtype)
        if QUANTISED:
            if MASKED:
                value_scale = tl.load(value_scales + scale_rows, mask=stored, other=0.0)
            else:
                value_scale = tl.load(value_scales + scale_rows)
            weights = weights * value_scale[None, :]
    if MASKED:
        reads = readable & stored[None, :]
        weights = tl.where(reads, weights, 0.0)
    if SPOILS:
        # Zero times NaN is NaN, so such a value becomes 0, and the sum of its readers NaN.
        broken = ~(tl.abs(value.to(tl.float32)) < float("inf"))
        value = tl.where(broken, 0.0, value)
        spoils = tl.max(broken.to(tl.int32), 1) > 0
        meets = tl.max((reads & spoils[None, :]).to(tl.int32), 1) > 0
        denominator = tl.where(meets, float("nan"), denominator)
    output = tl.dot(weights.to(query.dtype), value, acc=output, input_precision="ieee")
    return new_maximum, denominator, output
