"""Attention in plain torch, on any device, for when no compiled kernel is available.

A context is cut into spans of 64 positions and queries into rows of 8 positions,
both counted from position 0, so that the shape and the place of every matrix product follow
from positions alone; spans are summed in order.  Each section of 512 positions has a softmax,
and these are folded in order, as in the compiled kernels.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Self

import torch

from kvell.attention.interface import AttendParams, GroupBatch, LayerPages, Partial
from kvell.attention.merge import sink_share
from kvell.attention.quantised import quantise
from kvell.attention.sections import SectionRecords, check_elsewhere
from kvell.attention.spans import SPAN_TOKENS, Spans, gather_spans, page_views, skip_pages
from kvell.vocabulary import SECTION_TOKENS


@dataclass(frozen=True)
class SoftmaxState:
    """Softmax of one tile's rows: T tokens × group query heads of each kv head, token by token.

    :param maximum: float32 [kv_heads, T·group], the largest score; -inf where nothing was read.
    :param denominator: float32 [kv_heads, T·group], the sum of exp(score - maximum).
    :param output: float32 [kv_heads, T·group, output_size], the sum of exp(score - maximum)·v.
    """

    maximum: torch.Tensor
    denominator: torch.Tensor
    output: torch.Tensor

    @classmethod
    def of_record(cls, record: torch.Tensor, kv_heads: int) -> Self:
        """Build a state from a record: float32 [T, heads, 2 + output_size]."""
        tokens, heads, size = record.shape
        rows = record.reshape(tokens, kv_heads, heads // kv_heads, size).transpose(0, 1)
        rows = rows.flatten(1, 2)
        return cls(rows[..., 0].contiguous(), rows[..., 1].contiguous(), rows[..., 2:].contiguous())

    def then(self, later: Self) -> Self:
        """Fold the part that follows into this one (Infinite-LLM eq. 3)."""
        maximum = torch.maximum(self.maximum, later.maximum)
        keep, add = _shrink(self.maximum, maximum), _shrink(later.maximum, maximum)
        return type(self)(
            maximum,
            self.denominator * keep + later.denominator * add,
            self.output * keep[..., None] + later.output * add[..., None],
        )

    def normalise(self, tokens: int) -> Partial:
        """Return the rows as [T, heads] and [T, heads, output_size], 0 if they read nothing."""
        divisor = torch.where(self.denominator == 0, 1.0, self.denominator)
        return Partial(
            _by_token(self.output / divisor[..., None], tokens),
            _by_token(self.maximum[..., None], tokens)[..., 0],
            _by_token(self.denominator[..., None], tokens)[..., 0],
        )


def _by_token(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Transpose [kv_heads, T·group, size] → [T, heads, size]."""
    kv_heads, count, size = rows.shape
    return rows.reshape(kv_heads, tokens, count // tokens, size).transpose(0, 1).flatten(1, 2)


def _shrink(maximum: torch.Tensor, new_maximum: torch.Tensor) -> torch.Tensor:
    """Return exp(maximum - new_maximum), or 0 where this part read nothing (also if both did)."""
    return torch.where(maximum == -torch.inf, 0.0, torch.exp(maximum - new_maximum))


ROW_TOKENS = 8


class PortableKernels:
    """The attention contract in torch operations; each request's pages are gathered first."""

    name = "portable"

    def write_kv(
        self, layer: LayerPages, batch: GroupBatch, key: torch.Tensor, value: torch.Tensor | None
    ) -> None:
        """Store key and value [T, kv_heads, head_size] into their pages; pads are left out."""
        pages, rows = batch.write_page_ids.long(), batch.write_offsets.long()
        new_tensors = [key] if value is None else [key, value]
        kept = pages >= 0
        if not kept.all():
            pages, rows = pages[kept], rows[kept]
            new_tensors = [tensor[kept] for tensor in new_tensors]
        for stored, new in zip(page_views(layer), new_tensors, strict=True):
            stored[pages, :, rows] = quantise(new, layer.dtype) if layer.quantised else new

    def attend(
        self,
        layer: LayerPages,
        batch: GroupBatch,
        query: torch.Tensor,
        params: AttendParams,
        elsewhere: SectionRecords | None = None,
    ) -> torch.Tensor:
        """Compute attention of query [T, heads, head_size]; return [T, heads, output_size].

        :param elsewhere: records of the sections before the tables (:class:`SectionKernels`).
        :raises ValueError: if the records do not fit the batch.
        """
        if elsewhere is not None:
            check_elsewhere(layer, batch, query, params, elsewhere)
        whole = self._whole(layer, batch, query, params, elsewhere)
        output = whole.output
        if params.sinks is not None:
            output = output * sink_share(whole, params.sinks)[..., None]
        return output.to(query.dtype)

    def attend_partial(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> Partial:
        return self._whole(layer, batch, query, params, None)

    def _whole(
        self,
        layer: LayerPages,
        batch: GroupBatch,
        query: torch.Tensor,
        params: AttendParams,
        elsewhere: SectionRecords | None,
    ) -> Partial:
        whole = _empty_partial(query, layer.output_size)
        for request in requests_of(layer, batch, query, params):
            into = _rows_of(whole, request.rows)
            records: Iterable[torch.Tensor] = ()
            if elsewhere is not None:
                records = elsewhere.of(request.number, len(request.query)).to(query.device)
            for rows, tile in tiles_of(request):
                before = [_padded_state(record[rows], tile, layer.kv_heads) for record in records]
                states = [*before, *section_states(request.spans, tile, params)]
                if states:
                    _put(fold(states).normalise(ROW_TOKENS), tile.used, _rows_of(into, rows))
        return whole


@dataclass(frozen=True)
class _Request:
    """One request's query rows, from position ``first`` on, and the spans that they read."""

    number: int
    spans: Spans
    query: torch.Tensor
    rows: slice
    first: int


@dataclass(frozen=True)
class _Tile:
    """ROW_TOKENS query tokens from position ``first`` on, zero where not ``used``, in float32."""

    query: torch.Tensor
    first: int
    used: slice


def requests_of(
    layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
) -> Iterator[_Request]:
    starts = batch.query_starts.tolist()
    table_starts = batch.table_starts.tolist()
    first_positions = batch.first_positions.tolist()
    for i, context in enumerate(batch.context_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        if rows.start == rows.stop:
            continue
        table = batch.page_ids[table_starts[i] : table_starts[i + 1]].long()
        begin = first_positions[i] * layer.page_tokens
        first = context - (rows.stop - rows.start)
        table, begin = skip_pages(layer, table, begin, params.first_readable(first))
        yield _Request(i, gather_spans(layer, table, begin, context), query[rows], rows, first)


def _empty_partial(query: torch.Tensor, output_size: int) -> Partial:
    output = query.new_zeros((*query.shape[:2], output_size), dtype=torch.float32)
    maximum = output.new_full(query.shape[:2], -torch.inf)
    return Partial(output, maximum, torch.zeros_like(maximum))


def _rows_of(partial: Partial, rows: slice) -> Partial:
    return Partial(partial.output[rows], partial.maximum[rows], partial.denominator[rows])


def tiles_of(request: _Request) -> Iterator[tuple[slice, _Tile]]:
    query, first = request.query, request.first
    last = first + query.shape[0]
    for tile_first in range(first // ROW_TOKENS * ROW_TOKENS, last, ROW_TOKENS):
        begin = max(first, tile_first)
        end = min(last, tile_first + ROW_TOKENS)
        used = slice(begin - tile_first, end - tile_first)
        rows = slice(begin - first, end - first)
        padded = query.new_zeros((ROW_TOKENS, *query.shape[1:]), dtype=torch.float32)
        padded[used] = query[rows]
        yield rows, _Tile(padded, tile_first, used)


def _padded_state(record: torch.Tensor, tile: _Tile, kv_heads: int) -> SoftmaxState:
    """Return a record as the state of a whole tile; unused rows have read nothing."""
    whole = record.new_zeros((ROW_TOKENS, *record.shape[1:]))
    whole[..., 0] = -torch.inf
    whole[tile.used] = record
    return SoftmaxState.of_record(whole, kv_heads)


def _put(part: Partial, used: slice, into: Partial) -> None:
    into.output[:] = part.output[used]
    into.maximum[:] = part.maximum[used]
    into.denominator[:] = part.denominator[used]


def fold(states: Sequence[SoftmaxState]) -> SoftmaxState:
    return reduce(SoftmaxState.then, states)


def section_states(spans: Spans, tile: _Tile, params: AttendParams) -> list[SoftmaxState]:
    tokens, heads, head_size = tile.query.shape
    kv_heads, count = spans.key.shape[:2]
    if count == 0:
        return []
    group = heads // kv_heads
    rows = tile.query.view(tokens, kv_heads, group, head_size).permute(1, 0, 2, 3)
    rows = rows.reshape(kv_heads, 1, tokens * group, head_size).expand(-1, count, -1, -1)
    scores = _shape_scores(rows @ spans.key.transpose(2, 3), params)
    readable = _readable(spans, tile.first, params).repeat_interleave(group, 1)
    scores = scores.masked_fill(~readable, -torch.inf)
    cuts = _cuts(spans.first, count)
    if spans.has_numbers:
        return [_section(scores[:, cut], spans.value[:, cut]) for cut in cuts]
    return [_broken_section(scores[:, cut], spans.value[:, cut], readable[cut]) for cut in cuts]


def _cuts(first: int, count: int) -> list[slice]:
    each = SECTION_TOKENS // SPAN_TOKENS
    before = first % SECTION_TOKENS // SPAN_TOKENS
    bounds = range(-before, count, each)
    return [slice(max(0, begin), min(begin + each, count)) for begin in bounds]


def _section(scores: torch.Tensor, value: torch.Tensor) -> SoftmaxState:
    """Return the softmax of one section's scores [kv_heads, spans, rows, SPAN_TOKENS]."""
    maximum = scores.amax((1, 3))
    shift = torch.where(maximum == -torch.inf, 0.0, maximum)
    weights = torch.exp(scores - shift[:, None, :, None])
    return SoftmaxState(
        maximum, _sum_in_order(weights.sum(3)), _sum_in_order(weights @ value).contiguous()
    )


def _broken_section(
    scores: torch.Tensor, value: torch.Tensor, readable: torch.Tensor
) -> SoftmaxState:
    """Return the softmax of a section with values that are infinite or NaN.

    Zero times NaN is NaN, so these values count as 0, and the rows that read them become NaN.
    """
    has_number = value.isfinite()
    state = _section(scores, value.where(has_number, 0.0))
    spoils = readable.float() @ (~has_number).float()
    output = state.output.masked_fill(spoils.sum(1) > 0, torch.nan)
    return SoftmaxState(state.maximum, state.denominator, output)


def _shape_scores(scores: torch.Tensor, params: AttendParams) -> torch.Tensor:
    scores = scores * params.scale
    if params.softcap > 0:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    return scores


def _readable(spans: Spans, row_first: int, params: AttendParams) -> torch.Tensor:
    """Return bool [spans, ROW_TOKENS, SPAN_TOKENS]: the positions that each query token reads."""
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
    """Sum over dimension 1 (spans), first to last; empty spans add exact zeros."""
    return parts.cumsum(1)[:, -1]
