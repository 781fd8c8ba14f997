"""Triton kernels behind the attention contract."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvell.attention.checks import check_kv, check_query
from kvell.attention.interface import AttendParams, GroupBatch, LayerPages, Partial
from kvell.attention.quantised import LARGEST
from kvell.attention.triton.checks import FLOATS
from kvell.attention.triton.cutter import WorkCutter
from kvell.attention.triton.held import HeldGroupBatch
from kvell.attention.triton.launch import Launch, Pool, Results, Scratch, ScratchSize, Step
from kvell.attention.triton.sizes import (
    Blocks,
    HeadShape,
    long_blocks,
    power_above,
    short_blocks,
    working_dtype,
)
from kvell.attention.triton.work import Tiling
from kvell.attention.triton.writing import write_quantised, write_rows

_Rule = tuple[int, torch.dtype, float, int, float, int]
"""The key of a launch within its layer: heads, dtype, and the numbers of ``AttendParams``."""


@dataclass(frozen=True)
class _Known:
    """A layer's cached launches.  The reference is weak, so that its pool can be freed."""

    layer: weakref.ref[LayerPages]
    pool: Pool
    launches: dict[_Rule, tuple[Launch, Tiling]]


class TritonKernels:
    """Attention in Triton, for float32, bfloat16, float16 and quantised pools.

    A result depends on its request alone: not on the batch, nor on the placement of pages.
    Requests with few and with many new tokens run in different kernels, so the result of a
    token in a prefill chunk and in a decode differs by rounding.

    Use one stream at a time.  No call waits for the device if batches have ``host``.

    :param blocks: block sizes of short and long requests, in place of the measured ones.
    """

    name = "triton"

    def __init__(self, blocks: tuple[Blocks, Blocks] | None = None) -> None:
        self._blocks = blocks
        self._cutter = WorkCutter()
        self._scratch = Scratch()
        self._layers: dict[int, _Known] = {}

    def write_kv(
        self, layer: LayerPages, batch: GroupBatch, key: torch.Tensor, value: torch.Tensor | None
    ) -> None:
        """Store key and value [T, kv_heads, head_size] into their pages.

        :raises ValueError: if dtypes or shapes disagree.
        """
        pool = self._known(layer).pool
        check_kv(layer, batch, key, value, FLOATS)
        if not len(key):
            return
        _write(layer, batch, pool, pool.keys, pool.key_scales, key)
        if value is not None:
            _write(layer, batch, pool, pool.values, pool.value_scales, value)

    def attend(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> torch.Tensor:
        """Compute attention of query [T, heads, head_size]; return [T, heads, output_size].

        :raises ValueError: if dtypes or shapes are wrong.
        """
        output = torch.empty(
            (*query.shape[:2], layer.output_size), dtype=query.dtype, device=query.device
        )
        self._attend(layer, batch, query, params, Results(output, output, output, partial=False))
        return output

    def attend_partial(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> Partial:
        output = torch.empty(
            (*query.shape[:2], layer.output_size), dtype=torch.float32, device=query.device
        )
        maximum, denominator = output.new_empty((2, *query.shape[:2])).unbind()
        results = Results(output, maximum, denominator, partial=True)
        self._attend(layer, batch, query, params, results)
        return Partial(output, maximum, denominator)

    def tilings(self, batch: GroupBatch) -> tuple[Tiling, ...]:
        return self._cutter.tilings(batch)

    def scratch_size(self, batches: Iterable[HeldGroupBatch]) -> ScratchSize:
        """Return the memory that launches over these batches need, by the launches made so far.

        Launches share it, so it is the largest launch's.  In bytes: 4 × kv heads × parts ×
        (items × tokens of a tile × heads of a part × (output size + 2) + tiles).
        """
        size = ScratchSize()
        works = [batch.works for batch in batches]
        for entry in self._layers.values():
            for launch, tiling in entry.launches.values():
                for of_tiling in works:
                    if tiling in of_tiling:
                        size = size.largest(launch.scratch_size(of_tiling[tiling]))
        return size

    def reserve(self, size: ScratchSize, device: torch.device) -> None:
        """Allocate the memory of launches over held batches, before the first of them.

        :raises ValueError: if less is reserved already: captured launches keep its address.
        """
        self._scratch.reserve(size, device)

    def _attend(
        self,
        layer: LayerPages,
        batch: GroupBatch,
        query: torch.Tensor,
        params: AttendParams,
        results: Results,
    ) -> None:
        check_query(layer, query, params.sinks, FLOATS)
        if not len(query):
            return
        dtype = working_dtype(query.dtype, layer)
        launch, tiling = self._launch(layer, query.shape[1], dtype, params)
        work = self._cutter.work(batch, tiling)
        step = Step(batch, query.to(dtype), params.sinks, results)
        if work.short_tiles:
            launch.short(work, step, self._scratch)
        if len(work.tiles):
            launch.long(work, step)

    def _known(self, layer: LayerPages) -> _Known:
        key = id(layer)
        entry = self._layers.get(key)
        if entry is None or entry.layer() is not layer:
            pool = Pool.of(layer)
            layers = self._layers
            entry = _Known(weakref.ref(layer, lambda _: layers.pop(key, None)), pool, {})
            layers[key] = entry
        return entry

    def _launch(
        self, layer: LayerPages, heads: int, dtype: torch.dtype, params: AttendParams
    ) -> tuple[Launch, Tiling]:
        entry = self._known(layer)
        rule = (
            heads,
            dtype,
            params.scale,
            params.window_tokens,
            params.softcap,
            params.chunk_tokens,
        )
        ready = entry.launches.get(rule)
        if ready is None:
            ready = self._make(entry.pool, layer, HeadShape.of(layer, heads), dtype, params)
            entry.launches[rule] = ready
        return ready

    def _make(
        self,
        pool: Pool,
        layer: LayerPages,
        shape: HeadShape,
        dtype: torch.dtype,
        params: AttendParams,
    ) -> tuple[Launch, Tiling]:
        short, long = self._blocks or (
            short_blocks(layer, shape, dtype),
            long_blocks(layer, shape, dtype),
        )
        tiling = Tiling(
            shape.tile_tokens(short),
            shape.tile_tokens(long),
            short.section_tokens,
            layer.page_tokens,
            params.window_tokens,
            params.chunk_tokens,
        )
        return Launch(pool, layer, shape, params, (short, long)), tiling


def _write(
    layer: LayerPages,
    batch: GroupBatch,
    pool: Pool,
    place: torch.Tensor,
    scales: torch.Tensor,
    new: torch.Tensor,
) -> None:
    where = (batch.write_page_ids, batch.write_offsets, pool.page_stride)
    source = (new, new.stride(0), new.stride(1))
    if layer.quantised:
        write_quantised[(len(new), layer.kv_heads)](
            place,
            scales,
            *source,
            *where,
            pool.scale_stride,
            LARGEST=int(LARGEST[layer.dtype]),
            WHOLE=not layer.dtype.is_floating_point,
            PAGE_TOKENS=layer.page_tokens,
            SIZE=layer.head_size,
            BLOCK=power_above(layer.head_size),
            num_warps=1,
        )
        return
    write_rows[(len(new),)](
        place,
        *source,
        *where,
        KV_HEADS=layer.kv_heads,
        PAGE_TOKENS=layer.page_tokens,
        ROW=pool.row,
        BLOCK=power_above(layer.kv_heads * pool.row),
    )
