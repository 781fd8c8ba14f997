"""Records of sections by the compiled kernels, as a creditor's service computes them."""

from itertools import accumulate

import torch

from kvell.attention.interface import AttendParams, GroupBatch, LayerPages
from kvell.attention.native import NativeKernels
from kvell.attention.sections import SectionRecords
from kvell.vocabulary import SECTION_TOKENS


def new_records(layer: LayerPages, batch: GroupBatch, query: torch.Tensor) -> SectionRecords:
    """Allocate the records of query rows over the tables' sections: one from position 0 on."""
    tokens = layer.page_tokens
    counts = (batch.table_starts.diff() * tokens // SECTION_TOKENS).tolist()
    rows = batch.query_starts.diff().tolist()
    firsts = batch.first_positions.tolist()
    records = [
        n * (count if first else min(count, 1))
        for n, count, first in zip(rows, counts, firsts, strict=True)
    ]
    starts = torch.tensor([*accumulate(records, initial=0)], dtype=torch.int32)
    shape = (int(starts[-1]), query.shape[1], 2 + layer.output_size)
    return SectionRecords(starts, torch.empty(shape, dtype=torch.float32))


def native_records(
    kernels: NativeKernels,
    layer: LayerPages,
    batch: GroupBatch,
    query: torch.Tensor,
    params: AttendParams,
) -> SectionRecords:
    """Return records of query [T, heads, head_size] over whole sections, without sinks."""
    records = new_records(layer, batch, query)
    kernels.attend_into(layer, batch, query, params, records.values, records=records)
    return records
