"""Attention in plain torch, on any device: what runs where nothing was compiled.

A context is cut into spans of 64 positions and queries into rows of 8 positions,
both counted from position 0, so that every matrix product has a shape and a place
given by positions alone; sums over spans run in their order.
"""

from dataclasses import dataclass

import torch

from kvell.attention.interface import AttendParams, GroupBatch, LayerPages, Partial
from kvell.attention.merge import sink_share
from kvell.attention.quantised import dequantise, quantise

SPAN_TOKENS = 64
ROW_TOKENS = 8


@dataclass(frozen=True)
class _Spans:
    """One request's K and V, float32 [kv_heads, spans, SPAN_TOKENS, head_size (V: output_size)],
    zero where nothing is stored.  ``first`` is the position of the first row; tables cover
    positions [begin, end)."""

    key: torch.Tensor
    value: torch.Tensor
    first: int
    begin: int
    end: int


class PortableKernels:
    """The contract in torch operations; gathers each request's pages."""

    name = "portable"

    def write_kv(
        self, layer: LayerPages, batch: GroupBatch, key: torch.Tensor, value: torch.Tensor | None
    ) -> None:
        """Store key and value [T, kv_heads, head_size] into their pages."""
        pages, rows = batch.write_page_ids.long(), batch.write_offsets.long()
        new_tensors = (key,) if value is None else (key, value)
        for stored, new in zip(page_views(layer), new_tensors, strict=True):
            stored[pages, :, rows] = quantise(new, layer.dtype) if layer.quantised else new

    def attend(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> torch.Tensor:
        """Attention of query [T, heads, head_size]; returns [T, heads, output_size]."""
        whole = self.attend_partial(layer, batch, query, params)
        output = whole.output
        if params.sinks is not None:
            output = output * sink_share(whole, params.sinks)[..., None]
        return output.to(query.dtype)

    def attend_partial(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> Partial:
        """As :meth:`attend`, in float32 and mergeable; sinks are not applied."""
        partial = _empty_partial(query, layer.output_size)
        starts = batch.query_starts.tolist()
        table_starts = batch.table_starts.tolist()
        first_positions = batch.first_positions.tolist()
        for i, context in enumerate(batch.context_lens.tolist()):
            if starts[i] == starts[i + 1]:
                continue
            table = batch.page_ids[table_starts[i] : table_starts[i + 1]].long()
            begin = first_positions[i] * layer.page_tokens
            first = context - (starts[i + 1] - starts[i])
            table, begin = _skip_pages(layer, table, begin, params.first_readable(first))
            spans = _gather(layer, table, begin, context)
            rows = slice(starts[i], starts[i + 1])
            _attend_request(spans, query[rows], first, params, _rows_of(partial, rows))
        return partial


def _skip_pages(
    layer: LayerPages, table: torch.Tensor, begin: int, needed: int
) -> tuple[torch.Tensor, int]:
    """The table without the pages that lie wholly before position ``needed``."""
    pages = min(max(0, (needed - begin) // layer.page_tokens), len(table))
    return table[pages:], begin + pages * layer.page_tokens


def _empty_partial(query: torch.Tensor, output_size: int) -> Partial:
    output = query.new_zeros((*query.shape[:2], output_size), dtype=torch.float32)
    maximum = output.new_full(query.shape[:2], -torch.inf)
    return Partial(output, maximum, torch.zeros_like(maximum))


def _rows_of(partial: Partial, rows: slice) -> Partial:
    return Partial(partial.output[rows], partial.maximum[rows], partial.denominator[rows])


def page_views(layer: LayerPages) -> tuple[torch.Tensor, ...]:
    """The layer's stored tensors as [pages, kv_heads, page_tokens, row] views of the pool.

    K and V, or K alone if V is a part of it; rows are of the layer's dtype, or bytes with
    the scale behind the vector.
    """
    dtype = torch.uint8 if layer.quantised else layer.dtype
    pool = layer.pool.view(dtype)
    stride, offset, row, tensor = (
        size_bytes // dtype.itemsize
        for size_bytes in (
            layer.page_stride_bytes,
            layer.layer_offset_bytes,
            layer.row_bytes,
            layer.tensor_bytes,
        )
    )
    count = layer.page_bytes // layer.tensor_bytes
    pages = max(0, (pool.shape[0] - offset - count * tensor) // stride + 1)
    shape = (pages, layer.kv_heads, layer.page_tokens, row)
    strides = (stride, layer.page_tokens * row, row, 1)
    at = pool.storage_offset() + offset
    return tuple(pool.as_strided(shape, strides, at + i * tensor) for i in range(count))


def _gather(layer: LayerPages, table: torch.Tensor, begin: int, context: int) -> _Spans:
    """Copies a request's pages into spans; rows past the context are left out."""
    end = max(begin, min(begin + len(table) * layer.page_tokens, context))
    first = begin // SPAN_TOKENS * SPAN_TOKENS
    spans = -(-(end - first) // SPAN_TOKENS)
    stored = [_rows(view[table], end - begin) for view in page_views(layer)]
    plain = [dequantise(rows, layer.dtype) if layer.quantised else rows for rows in stored]
    whole = [_spread(rows, begin - first, spans) for rows in plain]
    return _Spans(whole[0], whole[-1][..., : layer.output_size], first, begin, end)


def _rows(pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """[pages, kv_heads, page_tokens, row] → [kv_heads, tokens, row]."""
    return pages.transpose(0, 1).reshape(pages.shape[1], -1, pages.shape[3])[:, :tokens]


def _spread(rows: torch.Tensor, at: int, spans: int) -> torch.Tensor:
    """[kv_heads, tokens, size] → float32 [kv_heads, spans, SPAN_TOKENS, size], from ``at`` on."""
    kv_heads, tokens, size = rows.shape
    whole = rows.new_zeros((kv_heads, spans * SPAN_TOKENS, size), dtype=torch.float32)
    whole[:, at : at + tokens] = rows
    return whole.view(kv_heads, spans, SPAN_TOKENS, size)


def _attend_request(
    spans: _Spans, query: torch.Tensor, first: int, params: AttendParams, into: Partial
) -> None:
    """Fills one request's rows, ROW_TOKENS positions at a time."""
    last = first + query.shape[0]
    for row_first in range(first // ROW_TOKENS * ROW_TOKENS, last, ROW_TOKENS):
        begin, end = max(first, row_first), min(last, row_first + ROW_TOKENS)
        used = slice(begin - row_first, end - row_first)
        padded = query.new_zeros((ROW_TOKENS, *query.shape[1:]), dtype=torch.float32)
        padded[used] = query[begin - first : end - first]
        part = _rows_of(_attend_rows(spans, padded, row_first, params), used)
        rows = slice(begin - first, end - first)
        into.output[rows] = part.output
        into.maximum[rows] = part.maximum
        into.denominator[rows] = part.denominator


def _attend_rows(
    spans: _Spans, query: torch.Tensor, row_first: int, params: AttendParams
) -> Partial:
    """Attention of ROW_TOKENS query tokens from position ``row_first`` on, over all spans."""
    tokens, heads, head_size = query.shape
    kv_heads, count = spans.key.shape[:2]
    group = heads // kv_heads
    if count == 0:
        return _empty_partial(query, spans.value.shape[3])
    rows = query.view(tokens, kv_heads, group, head_size).permute(1, 0, 2, 3)
    rows = rows.reshape(kv_heads, 1, tokens * group, head_size).expand(-1, count, -1, -1)
    scores = _shape_scores(rows @ spans.key.transpose(2, 3), params)
    readable = _readable(spans, row_first, params).repeat_interleave(group, 1)
    scores = scores.masked_fill(~readable, -torch.inf)
    maximum = scores.amax((1, 3))
    shift = torch.where(maximum == -torch.inf, 0.0, maximum)
    weights = torch.exp(scores - shift[:, None, :, None])
    denominator = _sum_in_order(weights.sum(3))
    output = _sum_in_order(weights @ spans.value)
    output = output / torch.where(denominator == 0, 1.0, denominator)[..., None]
    return Partial(
        output.view(kv_heads, tokens, group, -1).transpose(0, 1).reshape(tokens, heads, -1),
        maximum.view(kv_heads, tokens, group).transpose(0, 1).reshape(tokens, heads),
        denominator.view(kv_heads, tokens, group).transpose(0, 1).reshape(tokens, heads),
    )


def _shape_scores(scores: torch.Tensor, params: AttendParams) -> torch.Tensor:
    scores = scores * params.scale
    if params.softcap > 0:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    return scores


def _readable(spans: _Spans, row_first: int, params: AttendParams) -> torch.Tensor:
    """Bool [spans, ROW_TOKENS, SPAN_TOKENS]: which positions each query token reads."""
    device = spans.key.device
    count = spans.key.shape[1]
    position = torch.arange(spans.first, spans.first + count * SPAN_TOKENS, device=device)
    position = position.view(count, 1, SPAN_TOKENS)
    own = torch.arange(row_first, row_first + ROW_TOKENS, device=device).view(1, ROW_TOKENS, 1)
    readable = (position >= spans.begin) & (position < spans.end) & (position <= own)
    if params.window_tokens:
        readable &= position > own - params.window_tokens
    if params.chunk_tokens:
        readable &= position >= own - own % params.chunk_tokens
    return readable


def _sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Sum over the second dimension (spans), first to last; empty spans add exact zeros."""
    return parts.cumsum(1)[:, -1]
