"""Prefill: requests with many new tokens, one program for each tile of query rows.

A program walks the positions that its rows read from first to last.  Only the spans at both
ends, which not every row reads whole, are masked.
"""

import triton
import triton.language as tl

from kvell.attention.triton.span import NOWHERE, attend_span, finish, first_readable, tile_of

TILE_FIELDS = tl.constexpr(8)


@triton.jit(do_not_specialize=["window", "chunk"])
def attend_tiles(
    outputs,
    maxima,
    denominators,
    tiles,
    query,
    query_token_stride,
    query_head_stride,
    page_ids,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    page_stride,
    scale_stride,
    scale,
    softcap,
    window,
    chunk,
    HEADS: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PARTIAL: tl.constexpr,
    QUANTISED: tl.constexpr,
    LATENT: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    PART_HEADS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend for one tile, a row of ``work.TILE``.  Grid (tiles × kv heads × PARTS,), heads first.

    A tile's rows are its tokens times PART_HEADS of the GROUP query heads of a kv head.
    """
    places = HEADS // GROUP * PARTS
    place = tl.program_id(0) % places
    kv_head = place // PARTS
    fields = tiles + tl.program_id(0) // places * TILE_FIELDS
    table = page_ids + tl.load(fields)
    begin = tl.load(fields + 1)
    end = tl.load(fields + 2)
    first_own = tl.load(fields + 3)
    first_row = tl.load(fields + 4)
    count = tl.load(fields + 5)
    last_own = first_own + count - 1

    token, head, used, own, lowest, q, q_rest = tile_of(
        query, query_token_stride, query_head_stride, first_row, first_own, count, kv_head,
        place % PARTS, window, chunk, SIZE, SIZE_BLOCK, REST, REST_BLOCK, GROUP, PART_HEADS, M,
    )  # fmt: skip

    maximum = tl.full([M], NOWHERE, tl.float32)
    denominator = tl.zeros([M], tl.float32)
    output = tl.zeros([M, SIZE_BLOCK], tl.float32)
    head_rows = kv_head * (PAGE_TOKENS * ROW)
    head_scales = kv_head * (PAGE_TOKENS * ROW // 4)
    # [low, whole) and [masked, high) are masked; every row reads [whole, masked).
    low = tl.maximum(first_readable(first_own, window, chunk), begin) // N * N
    high = tl.minimum(last_own + 1, end)
    whole = tl.maximum(first_readable(last_own, window, chunk), begin)
    whole = tl.minimum((whole + N - 1) // N * N, tl.maximum(low, (high + N - 1) // N * N))
    masked = tl.maximum(whole, tl.minimum(first_own + 1, end) // N * N)
    for position in tl.range(low, tl.minimum(whole, high), N, num_stages=1):
        maximum, denominator, output = attend_span(
            maximum, denominator, output, q, q_rest, position, own, lowest, begin, end,
            table, keys + head_rows, values + head_rows, key_scales + head_scales,
            value_scales + head_scales, page_stride, scale_stride, scale, softcap, True,
            True, CAPPED, QUANTISED, LATENT, PAGE_TOKENS, ROW, SIZE, REST, REST_BLOCK, N,
        )  # fmt: skip
    for position in tl.range(whole, masked, N, num_stages=STAGES):
        maximum, denominator, output = attend_span(
            maximum, denominator, output, q, q_rest, position, own, lowest, begin, end,
            table, keys + head_rows, values + head_rows, key_scales + head_scales,
            value_scales + head_scales, page_stride, scale_stride, scale, softcap, False,
            False, CAPPED, QUANTISED, LATENT, PAGE_TOKENS, ROW, SIZE, REST, REST_BLOCK, N,
        )  # fmt: skip
    for position in tl.range(masked, high, N, num_stages=1):
        maximum, denominator, output = attend_span(
            maximum, denominator, output, q, q_rest, position, own, lowest, begin, end,
            table, keys + head_rows, values + head_rows, key_scales + head_scales,
            value_scales + head_scales, page_stride, scale_stride, scale, softcap, True,
            True, CAPPED, QUANTISED, LATENT, PAGE_TOKENS, ROW, SIZE, REST, REST_BLOCK, N,
        )  # fmt: skip

    finish(
        outputs, maxima, denominators, sinks, (first_row + token).to(tl.int64) * HEADS + head,
        head, used, maximum, denominator, output, HAS_SINKS, PARTIAL, SIZE, SIZE_BLOCK,
    )  # fmt: skip
