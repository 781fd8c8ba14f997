"""A request's pages as spans of positions, in torch, for the portable kernels."""

from dataclasses import dataclass

import torch

from kvell.attention.interface import LayerPages
from kvell.attention.quantised import dequantise

SPAN_TOKENS = 64
"""Positions of a span, counted from position 0."""


@dataclass(frozen=True)
class Spans:
    """One request's K and V, float32 [kv_heads, spans, SPAN_TOKENS, head_size (V: output_size)],
    zero where nothing is stored.  ``first`` is the position of the first row; the table covers
    positions [begin, end).  ``has_numbers``: no value is infinite or NaN."""

    key: torch.Tensor
    value: torch.Tensor
    first: int
    begin: int
    end: int
    has_numbers: bool


def page_views(layer: LayerPages) -> tuple[torch.Tensor, ...]:
    """Return K and V as [pages, kv_heads, page_tokens, row] views of the pool.

    V is absent if it is a part of K.  Rows have the layer's dtype, or are bytes in which the
    scale follows the vector.
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


def gather_spans(layer: LayerPages, table: torch.Tensor, begin: int, context: int) -> Spans:
    """Copy a request's pages into spans, without rows past the context."""
    end = max(begin, min(begin + len(table) * layer.page_tokens, context))
    first = begin // SPAN_TOKENS * SPAN_TOKENS
    spans = -(-(end - first) // SPAN_TOKENS)
    stored = [_rows(view[table], end - begin) for view in page_views(layer)]
    plain = [dequantise(rows, layer.dtype) if layer.quantised else rows for rows in stored]
    whole = [_spread(rows, begin - first, spans) for rows in plain]
    value = whole[-1][..., : layer.output_size]
    return Spans(whole[0], value, first, begin, end, bool(value.isfinite().all()))


def _rows(pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Reshape [pages, kv_heads, page_tokens, row] → [kv_heads, tokens, row]."""
    return pages.transpose(0, 1).reshape(pages.shape[1], -1, pages.shape[3])[:, :tokens]


def _spread(rows: torch.Tensor, at: int, spans: int) -> torch.Tensor:
    """Copy [kv_heads, tokens, size] into float32 [kv_heads, spans, SPAN_TOKENS, size] at ``at``."""
    kv_heads, tokens, size = rows.shape
    whole = rows.new_zeros((kv_heads, spans * SPAN_TOKENS, size), dtype=torch.float32)
    whole[:, at : at + tokens] = rows
    return whole.view(kv_heads, spans, SPAN_TOKENS, size)


def skip_pages(
    layer: LayerPages, table: torch.Tensor, begin: int, needed: int
) -> tuple[torch.Tensor, int]:
    pages = min(max(0, (needed - begin) // layer.page_tokens), len(table))
    return table[pages:], begin + pages * layer.page_tokens
