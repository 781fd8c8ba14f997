"""Records of sections by any kernels, as a creditor's service sends them."""

import torch

from kvell.attention.interface import AttendParams, GroupBatch, LayerPages
from kvell.attention.portable import ROW_TOKENS, fold, requests_of, section_states, tiles_of
from kvell.attention.sections import SectionKernels, SectionRecords


def section_records(
    kernels: SectionKernels,
    layer: LayerPages,
    batch: GroupBatch,
    query: torch.Tensor,
    params: AttendParams,
) -> SectionRecords:
    if kernels.name == "native":
        from bench.lending.native_records import native_records
        from kvell.attention.native import NativeKernels

        assert isinstance(kernels, NativeKernels)
        return native_records(kernels, layer, batch, query, params)
    made: list[torch.Tensor] = []
    starts = [0]
    for request in requests_of(layer, batch, query, params):
        of_tiles = []
        for _, tile in tiles_of(request):
            states = section_states(request.spans, tile, params)
            if states and not request.spans.begin:
                states = [fold(states)]
            of_tiles.append((tile.used, states))
        for number in range(len(of_tiles[0][1])):
            for used, states in of_tiles:
                state = states[number]
                rows = torch.cat(
                    [state.maximum[..., None], state.denominator[..., None], state.output], -1
                )
                heads, _, size = rows.shape
                by_token = rows.view(heads, ROW_TOKENS, -1, size).transpose(0, 1).flatten(1, 2)
                made.append(by_token[used])
        starts += [starts[-1]] * (request.number + 1 - len(starts))
        starts.append(sum(len(part) for part in made))
    starts += [starts[-1]] * (len(batch.query_starts) - len(starts))
    none = torch.empty(0, query.shape[1], 2 + layer.output_size)
    return SectionRecords(torch.tensor(starts, dtype=torch.int32), torch.cat([none, *made]))
