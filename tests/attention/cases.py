"""Ragged batches over a poisoned pool, and attention written out densely."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvell.attention.interface import (
    AttendParams,
    AttentionKernels,
    GroupBatch,
    HostLengths,
    LayerPages,
)
from kvell.attention.quantised import dequantise, is_quantised, quantise

PAGE = 16


@dataclass(frozen=True)
class Shape:
    """What a layer and its requests look like; ``requests`` are (context, new) token counts.

    ``pool_dtype`` is what the pool stores, the queries' ``dtype`` if not given.
    """

    requests: tuple[tuple[int, int], ...]
    heads: int = 9
    kv_heads: int = 3
    head_size: int = 64
    page_tokens: int = 16
    window_tokens: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0
    chunk_tokens: int = 0
    value_size: int = 0
    pool_dtype: torch.dtype | None = None

    @property
    def params(self) -> AttendParams:
        generator = torch.Generator().manual_seed(self.seed + 1)
        sinks = torch.randn(self.heads, generator=generator) if self.sinks else None
        scale = self.head_size**-0.5 * 2
        return AttendParams(scale, self.window_tokens, self.softcap, sinks, self.chunk_tokens)


@dataclass(frozen=True)
class Case:
    """A shape with data: whole contexts [context, heads, head_size] per request."""

    shape: Shape
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A pool that holds some requests' contexts, and the batch of one step over it."""

    layer: LayerPages
    batch: GroupBatch


def make_case(shape: Shape) -> Case:
    generator = torch.Generator().manual_seed(shape.seed)

    def draw(context: int, heads: int) -> torch.Tensor:
        drawn = torch.randn(context, heads, shape.head_size, generator=generator)
        return drawn.to(shape.dtype)

    contexts = [context for context, _ in shape.requests]
    queries = [draw(context, shape.heads) for context in contexts]
    keys = [_stored(draw(context, shape.kv_heads), shape) for context in contexts]
    if shape.value_size:
        return Case(shape, queries, keys, [key[..., : shape.value_size] for key in keys])
    values = [_stored(draw(context, shape.kv_heads), shape) for context in contexts]
    return Case(shape, queries, keys, values)


def _stored(drawn: torch.Tensor, shape: Shape) -> torch.Tensor:
    """As a plain pool of another dtype takes it; quantised ones take it as it is."""
    dtype = shape.pool_dtype or shape.dtype
    return drawn if is_quantised(dtype) else drawn.to(dtype)


def first_pages(shape: Shape) -> list[int]:
    """Page position of each table's first entry: pages behind the window are gone."""
    return [
        shape.params.first_readable(context - new) // shape.page_tokens
        for context, new in shape.requests
    ]


def make_layer(shape: Shape, pages: int) -> LayerPages:
    """A pool of NaN in which the layer has neighbours and pages have padding."""
    empty = torch.empty(0, dtype=torch.uint8)
    layer = LayerPages(
        empty,
        shape.pool_dtype or shape.dtype,
        0,
        0,
        shape.page_tokens,
        shape.kv_heads,
        shape.head_size,
        shape.value_size,
    )
    stride_bytes = 2 * layer.page_bytes + 64
    pool = torch.full((stride_bytes * pages // 2,), torch.nan, dtype=torch.bfloat16)
    return replace(
        layer,
        pool=pool.view(torch.uint8),
        page_stride_bytes=stride_bytes,
        layer_offset_bytes=layer.page_bytes,
    )


def store(kernels: AttentionKernels, case: Case, placement: int = 0) -> Stored:
    """Writes the case's contexts into shuffled pages through the kernels themselves."""
    shape = case.shape
    firsts = first_pages(shape)
    counts = [
        -(-context // shape.page_tokens) - first
        for (context, _), first in zip(shape.requests, firsts, strict=True)
    ]
    spare = 3
    order = torch.randperm(
        sum(counts) + spare, generator=torch.Generator().manual_seed(placement)
    ).to(torch.int32)
    tables = list(torch.split(order[: sum(counts)], counts))
    layer = make_layer(shape, sum(counts) + spare)
    _fill(kernels, layer, case, tables, firsts)
    return Stored(layer, make_batch(shape, tables, firsts))


def _fill(
    kernels: AttentionKernels,
    layer: LayerPages,
    case: Case,
    tables: list[torch.Tensor],
    firsts: list[int],
) -> None:
    for i, (context, _) in enumerate(case.shape.requests):
        begin = firsts[i] * layer.page_tokens
        if begin >= context:
            continue
        written = writing(tables[i], begin, context, layer.page_tokens, firsts[i])
        value = None if case.shape.value_size else case.values[i][begin:]
        kernels.write_kv(layer, written, case.keys[i][begin:], value)


def writing(table: torch.Tensor, begin: int, end: int, page_tokens: int, first: int) -> GroupBatch:
    """A batch that only says where positions [begin, end) of one request go."""
    positions = torch.arange(begin, end)
    empty = torch.zeros(0, dtype=torch.int32)
    return GroupBatch(
        empty,
        empty,
        empty,
        empty,
        empty,
        table[positions // page_tokens - first],
        (positions % page_tokens).to(torch.int32),
    )


def starts_of(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def lengths_of(requests: list[tuple[int, int]], firsts: list[int] | None = None) -> HostLengths:
    """Requests of (context, new) tokens whose tables are whole, or begin at ``firsts``."""
    firsts = firsts or [0] * len(requests)
    return HostLengths(
        starts_of([new for _, new in requests]),
        torch.tensor([context for context, _ in requests], dtype=torch.int32),
        starts_of([-(-c // PAGE) - f for (c, _), f in zip(requests, firsts, strict=True)]),
        torch.tensor(firsts, dtype=torch.int32),
    )


def make_batch(shape: Shape, tables: list[torch.Tensor], firsts: list[int]) -> GroupBatch:
    empty = torch.zeros(0, dtype=torch.int32)
    return GroupBatch(
        starts_of([new for _, new in shape.requests]),
        torch.tensor([context for context, _ in shape.requests], dtype=torch.int32),
        starts_of([len(table) for table in tables]),
        torch.cat([*tables, empty]),
        torch.tensor(firsts, dtype=torch.int32),
        empty,
        empty,
    )


def new_queries(case: Case) -> torch.Tensor:
    """The step's query rows: the last ``new`` tokens of each request."""
    rows = [
        query[context - new :]
        for query, (context, new) in zip(case.queries, case.shape.requests, strict=True)
    ]
    empty = torch.zeros(0, case.shape.heads, case.shape.head_size, dtype=case.shape.dtype)
    return torch.cat([*rows, empty])


def dense_attention(case: Case) -> torch.Tensor:
    """Attention of the step's rows by definition, in float64 [T, heads, head_size]."""
    shape = case.shape
    rows = [_dense_request(case, i, *request) for i, request in enumerate(shape.requests)]
    size = shape.value_size or shape.head_size
    empty = torch.zeros(0, shape.heads, size, dtype=torch.float64)
    return torch.cat([*rows, empty])


def dense_scores(case: Case, i: int, read: slice) -> torch.Tensor:
    """Scores of request ``i``'s rows over some positions, float64 [rows, heads, positions]."""
    shape, params = case.shape, case.shape.params
    context, new = shape.requests[i]
    query = case.queries[i][context - new :].double()
    key = _read_back(case.keys[i][read], shape).double()
    key = key.repeat_interleave(shape.heads // shape.kv_heads, 1)
    scores = torch.einsum("thd,shd->ths", query, key) * params.scale
    return params.softcap * torch.tanh(scores / params.softcap) if params.softcap else scores


def values_read(case: Case, i: int, read: slice) -> torch.Tensor:
    """What query heads read at some positions, float64 [positions, heads, size]."""
    shape = case.shape
    value = _read_back(case.values[i][read], shape)
    if shape.value_size:  # V is a part of what was stored as K
        value = _read_back(case.keys[i][read], shape)[..., : shape.value_size]
    return value.double().repeat_interleave(shape.heads // shape.kv_heads, 1)


def _dense_request(case: Case, i: int, context: int, new: int) -> torch.Tensor:
    params = case.shape.params
    scores, value = (of(case, i, slice(context)) for of in (dense_scores, values_read))
    own = torch.arange(context - new, context).view(-1, 1, 1)
    position = torch.arange(context)
    hidden = position > own
    if params.window_tokens:
        hidden |= position <= own - params.window_tokens
    if params.chunk_tokens:
        hidden |= position // params.chunk_tokens != own // params.chunk_tokens
    scores = scores.masked_fill(hidden, -math.inf)
    if params.sinks is not None:
        sinks = params.sinks.double().view(1, -1, 1).expand(new, -1, 1)
        return torch.einsum(
            "ths,shd->thd", torch.cat([scores, sinks], 2).softmax(2)[..., :-1], value
        )
    return torch.einsum("ths,shd->thd", scores.softmax(2), value)


def _read_back(vectors: torch.Tensor, shape: Shape) -> torch.Tensor:
    dtype = shape.pool_dtype or shape.dtype
    return dequantise(quantise(vectors, dtype), dtype) if is_quantised(dtype) else vectors


def attend(kernels: AttentionKernels, case: Case, placement: int = 0) -> torch.Tensor:
    stored = store(kernels, case, placement)
    return kernels.attend(stored.layer, stored.batch, new_queries(case), case.shape.params)


def only(case: Case, i: int, context: int, new: int) -> Case:
    """Request ``i`` alone, as it was when it had ``context`` tokens, ``new`` of them new."""
    shape = replace(case.shape, requests=((context, new),))
    return Case(
        shape, [case.queries[i][:context]], [case.keys[i][:context]], [case.values[i][:context]]
    )
