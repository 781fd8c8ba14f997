"""Softmax records of whole sections, which a creditor computes and a debtor folds.

Infinite-LLM (DistAttention, §4, equation 2): the debtor sends query rows to the instance that
holds a part of the context.  That creditor returns the part's largest score m, the sum e of
exp(score - m), and the unnormalised output o, the sum of exp(score - m)·v.  The debtor folds these
in the order of positions and continues with its local sections (equation 3).  Kernels reduce by
sections anyway, so the result is bitwise the same as with local pages.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from kvell.attention.interface import AttendParams, AttentionKernels, GroupBatch, LayerPages
from kvell.vocabulary import SECTION_TOKENS


@dataclass(frozen=True)
class SectionRecords:
    """Records of n requests of a batch, in the format that is sent between instances.

    Request i's records are contiguous: ``values[starts[i]:starts[i + 1]]`` is
    ``[records, rows, heads, 2 + output_size]`` of float32, where rows are the request's new tokens
    and records are in order of position.  The numbers of a record are m, e, then o.

    A record covers one section.  A part of the context that begins at position 0 has one record
    for all of its sections: no section precedes them, so folding them early changes no bit.

    :param starts: int32 [n + 1], in rows of all heads, in host memory.
    :param values: float32 [starts[n], heads, 2 + output_size], contiguous, in host memory.
    """

    starts: torch.Tensor
    values: torch.Tensor

    def of(self, request: int, rows: int) -> torch.Tensor:
        """Return one request's records, a view ``[records, rows, heads, 2 + output_size]``."""
        begin, end = self.starts[request : request + 2].tolist()
        values = self.values[begin:end]
        return values.view((end - begin) // max(1, rows), rows, *values.shape[1:])


class SectionKernels(AttentionKernels, Protocol):
    """Kernels that support contexts whose first sections are remote."""

    def attend(
        self,
        layer: LayerPages,
        batch: GroupBatch,
        query: torch.Tensor,
        params: AttendParams,
        elsewhere: SectionRecords | None = None,
    ) -> torch.Tensor:
        """Compute attention as :meth:`AttentionKernels.attend`, after remote sections.

        :param elsewhere: records of all sections before each request's table, which then begins at
            a multiple of ``SECTION_TOKENS``.  A request without records has no remote section.
        :raises ValueError: if the records do not fit the batch, or attention is not full.
        """
        ...


def check_elsewhere(
    layer: LayerPages,
    batch: GroupBatch,
    query: torch.Tensor,
    params: AttendParams,
    elsewhere: SectionRecords,
) -> None:
    if params.window_tokens or params.chunk_tokens:
        raise ValueError(
            "elsewhere: this layer reads a window or chunk, whose pages stay local; "
            "use groups of full attention only"
        )
    starts, values = elsewhere.starts, elsewhere.values
    on_host = values.device.type == "cpu"
    if values.dtype != torch.float32 or not values.is_contiguous() or not on_host:
        raise ValueError(
            f"elsewhere.values: is {values.dtype} on {values.device} with strides "
            f"{values.stride()}; pass contiguous float32 in host memory"
        )
    shape = (query.shape[1], 2 + layer.output_size)
    if values.dim() != 3 or values.shape[1:] != shape:
        raise ValueError(
            f"elsewhere.values: is {list(values.shape)}; pass [rows, {shape[0]}, {shape[1]}]: "
            "heads, and two numbers before the output's"
        )
    if starts.dtype != torch.int32 or starts.shape != batch.query_starts.shape:
        raise ValueError(
            f"elsewhere.starts: is {starts.dtype} {list(starts.shape)}; "
            f"pass int32 [{len(batch.query_starts)}], one more than there are requests"
        )
    bounds = starts.tolist()
    if not starts.is_contiguous() or bounds[0] != 0 or bounds[-1] != len(values):
        raise ValueError(
            f"elsewhere.starts: runs from {bounds[0]} to {bounds[-1]}; "
            f"pass contiguous starts that run from 0 to the {len(values)} rows of values"
        )
    lengths, rows = starts.diff().tolist(), batch.query_starts.diff().tolist()
    contexts, firsts = batch.context_lens.tolist(), batch.first_positions.tolist()
    for i, length in enumerate(lengths):
        if rows[i]:
            begin = firsts[i] * layer.page_tokens
            _check_request(i, length, rows[i], begin, contexts[i] - rows[i])
        elif length:
            raise ValueError(
                f"elsewhere.starts: request {i} has no query rows; leave its records out"
            )


def _check_request(request: int, length: int, rows: int, begin: int, first_row: int) -> None:
    if length < 0 or length % rows:
        raise ValueError(
            f"elsewhere.starts: request {request} has {length} rows of records for {rows} query "
            "rows; pass as many records for each of them"
        )
    if not length and not begin:
        return
    if begin % SECTION_TOKENS:
        raise ValueError(
            f"first_positions: request {request}'s table begins at position {begin}, inside a "
            f"section; begin at a multiple of {SECTION_TOKENS}"
        )
    sections, records = begin // SECTION_TOKENS, length // rows
    if not 1 <= records <= sections:
        raise ValueError(
            f"elsewhere.starts: request {request} has {records} records of the {sections} sections "
            "before its table; pass one for each, or one for all that are folded"
        )
    if first_row < begin:
        raise ValueError(
            f"context_lens: request {request} has a query row at position {first_row}, among the "
            f"{begin} remote ones; lend only sections before the step's first new token"
        )
