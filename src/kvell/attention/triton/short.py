"""Decode and other requests with few new tokens: many programs for each request.

A context is cut into sections, counted from position 0; a program attends to one section for
one tile of rows, stores its softmax in scratch memory, and takes the next.  The program that
finishes a tile's last section folds all of them in the order of positions.  So neither the
other requests of a batch nor the number of programs can change a result.
"""

import triton
import triton.language as tl

from kvell.attention.triton.span import NOWHERE, attend_span, finish, first_readable, tile_of

ITEM_FIELDS = tl.constexpr(12)


@triton.jit(do_not_specialize=["window", "chunk", "tokens_stride"])
def attend_sections(
    outputs,
    maxima,
    denominators,
    part_outputs,
    part_maxima,
    part_denominators,
    counters,
    num_items,
    items,
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
    tokens_stride,
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
    FOLD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend to the section of each item, for its tile.  The grid (programs,) is of any size.

    Program p attends for work p, p + programs, … of items × kv heads × PARTS, heads first.  Items
    from ``num_items`` on are not read, so a captured launch serves any number.

    An item is a row of ``work.ITEM``.  A tile's rows are its tokens times PART_HEADS of the
    GROUP query heads of a kv head.  Scratch rows are [item, kv head and part, token, head of
    the part]; ``counters`` are zero before and after the launch.
    """
    places = HEADS // GROUP * PARTS
    num_work = tl.load(num_items) * places
    for work in tl.range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = work // places
        place = work % places
        kv_head = place // PARTS
        fields = items + item * ITEM_FIELDS
        table = page_ids + tl.load(fields)
        begin = tl.load(fields + 1)
        end = tl.load(fields + 2)
        first_own = tl.load(fields + 3)
        first_row = tl.load(fields + 4)
        count = tl.load(fields + 5)
        section_begin = tl.load(fields + 6)
        section_end = tl.load(fields + 7)
        first_item = tl.load(fields + 8)
        sections = tl.load(fields + 9)
        tile = tl.load(fields + 10)

        row = tl.arange(0, M)
        dims = tl.arange(0, SIZE_BLOCK)
        token, head, used, own, lowest, q, q_rest = tile_of(
            query, query_token_stride, query_head_stride, first_row, first_own, count, kv_head,
            place % PARTS, window, chunk, SIZE, SIZE_BLOCK, REST, REST_BLOCK, GROUP, PART_HEADS, M,
        )  # fmt: skip

        maximum = tl.full([M], NOWHERE, tl.float32)
        denominator = tl.zeros([M], tl.float32)
        output = tl.zeros([M, SIZE_BLOCK], tl.float32)
        head_rows = kv_head * (PAGE_TOKENS * ROW)
        head_scales = kv_head * (PAGE_TOKENS * ROW // 4)
        low = tl.maximum(first_readable(first_own, window, chunk), begin) // N * N
        low = tl.maximum(section_begin, low)
        high = tl.minimum(tl.minimum(section_end, first_own + count), end)
        # A section that every row reads whole needs no mask.
        whole = low >= tl.maximum(first_readable(first_own + count - 1, window, chunk), begin)
        whole = whole & (high == section_end) & (high <= first_own + 1)
        masked = tl.where(whole, high, low)
        for position in tl.range(low, masked, N, num_stages=STAGES):
            maximum, denominator, output = attend_span(
                maximum, denominator, output, q, q_rest, position, own, lowest, begin, end,
                table, keys + head_rows, values + head_rows, key_scales + head_scales,
                value_scales + head_scales, page_stride, scale_stride, scale, softcap, False,
                False, CAPPED, QUANTISED, LATENT, PAGE_TOKENS, ROW, SIZE, REST, REST_BLOCK, N,
            )  # fmt: skip
        for position in tl.range(masked, high, N, num_stages=STAGES):
            maximum, denominator, output = attend_span(
                maximum, denominator, output, q, q_rest, position, own, lowest, begin, end,
                table, keys + head_rows, values + head_rows, key_scales + head_scales,
                value_scales + head_scales, page_stride, scale_stride, scale, softcap, True,
                False, CAPPED, QUANTISED, LATENT, PAGE_TOKENS, ROW, SIZE, REST, REST_BLOCK, N,
            )  # fmt: skip
        # A row may have met a value that it does not read: then each token once more, by itself.
        # To look for it in every span would take registers that other programs need.
        again = tl.where((masked < high) & _has_no_number(output), count, 0)
        for mine in tl.range(0, again, num_stages=1):
            only = first_own + mine
            from_here = tl.maximum(begin, first_readable(only, window, chunk))
            alone_maximum = tl.full([M], NOWHERE, tl.float32)
            alone_denominator = tl.zeros([M], tl.float32)
            alone = tl.zeros([M, SIZE_BLOCK], tl.float32)
            for position in tl.range(low, high, N, num_stages=1):
                alone_maximum, alone_denominator, alone = attend_span(
                    alone_maximum, alone_denominator, alone, q, q_rest, position, own, lowest,
                    from_here, tl.minimum(end, only + 1),
                    table, keys + head_rows, values + head_rows, key_scales + head_scales,
                    value_scales + head_scales, page_stride, scale_stride, scale, softcap,
                    True, False, CAPPED, QUANTISED, LATENT, PAGE_TOKENS, ROW, SIZE, REST,
                    REST_BLOCK, N,
                )  # fmt: skip
            output = tl.where((token == mine)[:, None], alone, output)
        counter = counters + tile * places + place
        is_last = sections == 1
        if sections > 1:
            rows = (item.to(tl.int64) * places + place) * tokens_stride * PART_HEADS + row
            tl.store(part_maxima + rows, maximum, mask=used)
            tl.store(part_denominators + rows, denominator, mask=used)
            tl.store(
                part_outputs + rows[:, None] * SIZE + dims[None, :],
                output,
                mask=used[:, None] & (dims < SIZE)[None, :],
            )
            tl.debug_barrier()
            is_last = tl.atomic_add(counter, 1) == sections - 1
        # Not inside the branch above: Triton 3.9 cannot compile that of partials.
        if is_last & (sections > 1):
            tl.store(counter, 0)
            rows = (first_item.to(tl.int64) * places + place) * tokens_stride * PART_HEADS + row
            maximum, denominator, output = _fold(
                part_outputs,
                part_maxima,
                part_denominators,
                rows,
                used,
                tokens_stride * (places * PART_HEADS),
                sections,
                FOLD,
                SIZE,
                SIZE_BLOCK,
            )
        if is_last:
            at = (first_row + token).to(tl.int64) * HEADS + head
            finish(
                outputs, maxima, denominators, sinks, at, head, used, maximum, denominator, output,
                HAS_SINKS, PARTIAL, SIZE, SIZE_BLOCK,
            )  # fmt: skip


@triton.jit
def _has_no_number(output):
    """Return whether any number is infinite or NaN."""
    return tl.max(tl.max((~(tl.abs(output) < float("inf"))).to(tl.int32), 1), 0) > 0


@triton.jit
def _fold(
    part_outputs,
    part_maxima,
    part_denominators,
    rows,
    used,
    item_rows,
    sections,
    FOLD: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    """Fold the softmax of a tile's sections, first to last.

    FOLD sections are loaded together, so that their loads overlap.  Loads skip the L1 cache,
    which may hold stale data.
    """
    M: tl.constexpr = rows.shape[0]
    nothing = tl.zeros([M], tl.int32)  # the interpreter cannot splat a bool
    dims = tl.arange(0, SIZE_BLOCK)
    maximum = tl.full([M], NOWHERE, tl.float32)
    denominator = tl.zeros([M], tl.float32)
    output = tl.zeros([M, SIZE_BLOCK], tl.float32)
    for start in range(0, sections, FOLD):
        largest = maximum
        for step in tl.static_range(FOLD):
            there = used & (sections - start + nothing > step)
            at = rows + item_rows.to(tl.int64) * (start + step)
            part = tl.load(part_maxima + at, mask=there, other=NOWHERE, cache_modifier=".cg")
            largest = tl.maximum(largest, part)
        shift = tl.where(largest == NOWHERE, 0.0, largest)
        shrink = tl.exp2(maximum - shift)
        denominator = denominator * shrink
        output = output * shrink[:, None]
        for step in tl.static_range(FOLD):
            there = used & (sections - start + nothing > step)
            at = rows + item_rows.to(tl.int64) * (start + step)
            part = tl.load(part_maxima + at, mask=there, other=NOWHERE, cache_modifier=".cg")
            total = tl.load(part_denominators + at, mask=there, other=0.0, cache_modifier=".cg")
            numbers = tl.load(
                part_outputs + at[:, None] * SIZE + dims[None, :],
                mask=there[:, None] & (dims < SIZE)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            weight = tl.exp2(part - shift)
            denominator += total * weight
            output += numbers * weight[:, None]
        maximum = largest
    return maximum, denominator, output
