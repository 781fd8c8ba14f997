"""The contract of every attention backend: layers over pages, groups over steps.

A layer sees its group as (start offset, page stride, page ids), as in Jenga
fig. 7c; the metadata of a group is built once per step and shared by its layers.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvell.attention.quantised import is_quantised, scale_bytes_of


@dataclass(frozen=True)
class LayerPages:
    """The location of one layer's K and V in the pool.

    ``pool`` is the whole KV range as a flat uint8 tensor.  K of page p is the
    block ``[kv_heads, page_tokens, head_size]`` of ``dtype`` that starts at byte
    ``p * page_stride_bytes + layer_offset_bytes``; V follows it directly in the
    same shape.  Offsets are multiples of the element size; arithmetic is 64 bit.

    A quantised dtype (int8, float8_e4m3fn) has a float32 scale after each vector
    (:mod:`kvell.attention.quantised`).

    :param value_size: 0, or the length of a latent: then V is the first ``value_size``
        numbers of K, and only K is stored.
    """

    pool: torch.Tensor
    dtype: torch.dtype
    page_stride_bytes: int
    layer_offset_bytes: int
    page_tokens: int
    kv_heads: int
    head_size: int
    value_size: int = 0

    @property
    def quantised(self) -> bool:
        return is_quantised(self.dtype)

    @property
    def row_bytes(self) -> int:
        return self.head_size * self.dtype.itemsize + scale_bytes_of(self.dtype)

    @property
    def tensor_bytes(self) -> int:
        return self.kv_heads * self.page_tokens * self.row_bytes

    @property
    def page_bytes(self) -> int:
        return self.tensor_bytes * (1 if self.value_size else 2)

    @property
    def output_size(self) -> int:
        return self.value_size or self.head_size


@dataclass(frozen=True)
class HostLengths:
    """A copy of the lengths of a :class:`GroupBatch`, int32 in host memory.

    Kernels on a GPU size their launches by these without waiting for the device.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    table_starts: torch.Tensor
    first_positions: torch.Tensor


@dataclass(frozen=True)
class GroupBatch:
    """One group's metadata for one step over a ragged batch of n requests, T new tokens.

    All tensors are int32, contiguous, on the pool's device.

    :param query_starts: [n+1], request i's new tokens are rows query_starts[i]:query_starts[i+1].
    :param context_lens: [n], tokens of request i including this step's: its last new token
        is at position context_lens[i]-1.
    :param table_starts: [n+1], request i's page ids are
        page_ids[table_starts[i]:table_starts[i+1]].
    :param page_ids: [Σ], physical page ids, in order of position.
    :param first_positions: [n], page position of the first entry of each table: entry j holds
        tokens (first_positions[i]+j)*page_tokens onward.  Non-zero once the window has passed
        whole pages.
    :param write_page_ids: [T], page that stores each new token; below 0 for a pad, which is not
        stored.  Native kernels get no pads.
    :param write_offsets: [T], the token's row inside that page.
    :param host: the lengths in host memory if the tensors are on a GPU; None: kernels that
        need them copy them from the device.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    table_starts: torch.Tensor
    page_ids: torch.Tensor
    first_positions: torch.Tensor
    write_page_ids: torch.Tensor
    write_offsets: torch.Tensor
    host: HostLengths | None = field(default=None, kw_only=True)


def part_sizes(requests: int, pages: int, tokens: int) -> list[int]:
    """Return the lengths of the tensors of a :class:`GroupBatch`, in the order of its fields.

    :param pages: the number of pages in all tables.
    """
    return [requests + 1, requests, requests + 1, pages, requests, tokens, tokens]


@dataclass(frozen=True)
class Partial:
    """Attention over a part of the context, mergeable with other parts (Infinite-LLM eq. 2-3).

    :param output: float32 [T, heads, output_size], normalised over this part alone.
    :param maximum: float32 [T, heads], the largest score; -inf where the part is empty.
    :param denominator: float32 [T, heads], sum of exp(score - maximum); 0 where empty.
    """

    output: torch.Tensor
    maximum: torch.Tensor
    denominator: torch.Tensor


@dataclass(frozen=True)
class AttendParams:
    """The treatment of a layer's attention scores.

    :param scale: multiplies q·k.
    :param window_tokens: 0 for full attention; else a token reads itself and the
        window_tokens-1 before it.
    :param chunk_tokens: 0, or a token reads nothing before the last multiple of
        chunk_tokens at or before its own position (Llama 4).
    :param softcap: 0 for none; else scores become softcap*tanh(score/softcap) after scaling.
    :param sinks: float32 [heads] or None: a learned logit per head that joins the
        denominator only (gpt-oss).
    """

    scale: float
    window_tokens: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    chunk_tokens: int = 0

    def first_readable(self, position: int) -> int:
        behind_window = position - self.window_tokens + 1 if self.window_tokens else 0
        chunk_start = position - position % self.chunk_tokens if self.chunk_tokens else 0
        return max(0, behind_window, chunk_start)


class AttentionKernels(Protocol):
    """Attention over paged memory.  Every query is causal: it reads positions ≤ its own.

    A pad is a token whose page is below 0, which is not stored, or a row of a request whose
    context is 0, which reads nothing and becomes 0.  Rows of a batch in memory
    (``triton.held``) that no work covers are not written and hold anything, NaN too.  No other
    row depends on a pad.

    Results do not depend on how tokens are split over steps, on the other
    requests of the batch, or on the placement of pages: each (token, head) is reduced
    in the order of positions.  (In Triton, requests with few and with many new tokens run in
    different kernels, whose results differ by rounding.)
    """

    name: str

    def write_kv(
        self, layer: LayerPages, batch: GroupBatch, key: torch.Tensor, value: torch.Tensor | None
    ) -> None:
        """Store key and value, each [T, kv_heads, head_size] (any strides with a
        contiguous last dimension), into their pages.

        Both have the layer's dtype, or any float dtype if the layer is quantised.  The value is
        None if it is a part of the key.
        """
        ...

    def attend(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> torch.Tensor:
        """Compute attention of query [T, heads, head_size] over each request's pages.

        The new tokens' own K and V must have been written.  Returns [T, heads,
        output_size] in the query's dtype; heads is a multiple of kv_heads, and query
        head h reads kv head h // (heads // kv_heads).
        """
        ...

    def attend_partial(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> Partial:
        """Compute attention as :meth:`attend`, but mergeable, over the pages listed in the batch.

        Positions not covered by a request's table are not read; sinks are not applied (the
        merge applies them once).
        """
        ...
