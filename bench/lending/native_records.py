"""Records of sections by the compiled kernels, as a creditor's service computes them."""

from itertools import accumulate

import torch

from kvell.attention import _kernels
from kvell.attention.interface import AttendParams, GroupBatch, LayerPages
from kvell.attention.native import ELEMENTS, NativeKernels, batch_args, layer_args, records_args
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
    _kernels.attend(
        kernels.instruction_set,
        layer_args(layer),
        batch_args(batch, query.shape[0]),
        query.data_ptr(),
        ELEMENTS[query.dtype],
        query.stride(0),
        query.stride(1),
        query.shape[1],
        params.scale,
        params.window_tokens,
        params.chunk_tokens,
        params.softcap,
        0,
        records.values.data_ptr(),
        ELEMENTS[torch.float32],
        0,
        0,
        (0, 0),
        records_args(records),
        kernels.num_threads,
    )
    return records
