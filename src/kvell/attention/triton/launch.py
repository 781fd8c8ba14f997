"""The launches of a layer: arguments that are the same in every step are built once."""

from dataclasses import dataclass
from typing import Any

import torch

from kvell.attention.interface import AttendParams, GroupBatch, LayerPages
from kvell.attention.quantised import SCALE_BYTES
from kvell.attention.triton.checks import check_layer
from kvell.attention.triton.held import HeldGroupBatch
from kvell.attention.triton.long import attend_tiles
from kvell.attention.triton.short import attend_sections
from kvell.attention.triton.sizes import Blocks, HeadShape
from kvell.attention.triton.work import UNLIMITED, Work

FOLD_NUMBERS = 8192
"""Numbers of sections' outputs that a fold loads together: half as many made decode 8 % slower
at batch 8, twice as many took registers that other programs need."""


@dataclass(frozen=True)
class Pool:
    """A layer's pages as pointers and strides, counted in elements (scales in float32)."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor
    page_stride: int
    scale_stride: int
    row: int

    @staticmethod
    def of(layer: LayerPages) -> "Pool":
        """Return the pointers and strides of a layer.

        :raises ValueError: if the kernels do not support the layer.
        """
        check_layer(layer)
        size, offset = layer.dtype.itemsize, layer.layer_offset_bytes
        to_values = 0 if layer.value_size else layer.tensor_bytes
        keys, values = (_typed(layer.pool, layer.dtype, offset + at) for at in (0, to_values))
        scales = (keys, keys)
        if layer.quantised:
            behind = offset + layer.head_size
            scales = (
                _typed(layer.pool, torch.float32, behind),
                _typed(layer.pool, torch.float32, behind + to_values),
            )
        return Pool(
            keys,
            values,
            *scales,
            layer.page_stride_bytes // size,
            layer.page_stride_bytes // SCALE_BYTES,
            layer.row_bytes // size,
        )


def _typed(pool: torch.Tensor, dtype: torch.dtype, offset_bytes: int) -> torch.Tensor:
    behind = pool[offset_bytes:]
    return behind[: behind.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Results:
    """The tensors that a call writes; with ``partial``, output is mergeable and without sinks."""

    output: torch.Tensor
    maximum: torch.Tensor
    denominator: torch.Tensor
    partial: bool


@dataclass(frozen=True)
class Step:
    """The arguments that change with every call; ``query`` is [T, heads, size]."""

    batch: GroupBatch
    query: torch.Tensor
    sinks: torch.Tensor | None
    results: Results


@dataclass(frozen=True)
class ScratchSize:
    """Sizes of the memory of a launch for short requests."""

    numbers: int = 0
    counters: int = 0

    @property
    def size_bytes(self) -> int:
        return 4 * (self.numbers + self.counters)

    def largest(self, other: "ScratchSize") -> "ScratchSize":
        return ScratchSize(max(self.numbers, other.numbers), max(self.counters, other.counters))

    def fits(self, other: "ScratchSize") -> bool:
        return self.largest(other) == self


class Scratch:
    """Memory that the launches of one stream share.  Counters are zero between launches.

    Captured launches keep addresses, so what they use is reserved and never grows.  Other launches
    have counters of their own, which may.
    """

    def __init__(self) -> None:
        self._counters: dict[torch.device, torch.Tensor] = {}
        self._reserved: dict[torch.device, tuple[ScratchSize, torch.Tensor, torch.Tensor]] = {}

    def reserve(self, size: ScratchSize, device: torch.device) -> None:
        """Allocate the memory of captured launches, once.

        :raises ValueError: if less is reserved already.
        """
        reserved = self._reserved.get(device)
        if reserved is None:
            numbers = torch.empty(size.numbers, dtype=torch.float32, device=device)
            counters = torch.zeros(size.counters, dtype=torch.int32, device=device)
            self._reserved[device] = (size, numbers, counters)
        elif not reserved[0].fits(size):
            raise ValueError(f"scratch: {size} is needed, {reserved[0]} is reserved for good")

    def get_reserved(
        self, size: ScratchSize, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return reserved numbers and counters.

        :raises ValueError: if less is reserved.
        """
        reserved = self._reserved.get(device)
        if reserved is None or not reserved[0].fits(size):
            has = reserved[0] if reserved else None
            raise ValueError(f"scratch: {size} is needed, {has} is reserved; reserve it before")
        return reserved[1], reserved[2]

    def allocate(
        self, size: ScratchSize, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return new numbers and at least as many zero counters."""
        numbers = torch.empty(size.numbers, dtype=torch.float32, device=device)
        counters = self._counters.get(device)
        if counters is None or len(counters) < size.counters:
            most = max(4096, 2 * size.counters)
            counters = torch.zeros(most, dtype=torch.int32, device=device)
            self._counters[device] = counters
        return numbers, counters


class Launch:
    """One layer's attention with one rule: block sizes chosen, arguments collected."""

    def __init__(
        self,
        pool: Pool,
        layer: LayerPages,
        shape: HeadShape,
        params: AttendParams,
        blocks: tuple[Blocks, Blocks],
    ) -> None:
        self._shape = shape
        self._kv_heads = layer.kv_heads
        self._short, self._long = blocks
        self._common = {
            "keys": pool.keys,
            "values": pool.values,
            "key_scales": pool.key_scales,
            "value_scales": pool.value_scales,
            "page_stride": pool.page_stride,
            "scale_stride": pool.scale_stride,
            "scale": params.scale,
            "softcap": params.softcap,
            "window": params.window_tokens or UNLIMITED,
            "chunk": params.chunk_tokens or UNLIMITED,
            "HEADS": layer.kv_heads * shape.group,
            "CAPPED": params.softcap > 0,
            "QUANTISED": layer.quantised,
            "LATENT": layer.value_size > 0,
            "PAGE_TOKENS": layer.page_tokens,
            "ROW": pool.row,
            "SIZE": shape.size,
            "SIZE_BLOCK": shape.size_block,
            "REST": shape.rest,
            "REST_BLOCK": shape.rest_block,
            "GROUP": shape.group,
            "enable_fp_fusion": True,
        }

    def scratch_size(self, work: Work) -> ScratchSize:
        numbers = self._section_rows(work) * (self._shape.size + 2)
        return ScratchSize(numbers, work.short_tiles * self._places(self._short))

    def short(self, work: Work, step: Step, scratch: Scratch) -> None:
        shape, blocks, device = self._shape, self._short, step.query.device
        is_held = isinstance(step.batch, HeldGroupBatch)
        find = scratch.get_reserved if is_held else scratch.allocate
        numbers, counters = find(self.scratch_size(work), device)
        rows = self._section_rows(work)
        programs = len(work.items) * self._places(blocks)
        if work.most_programs is not None:
            programs = min(programs, work.most_programs)
        attend_sections[(programs,)](
            part_outputs=numbers,
            part_maxima=numbers[rows * shape.size :],
            part_denominators=numbers[rows * (shape.size + 1) :],
            counters=counters,
            num_items=work.num_items,
            items=work.items,
            tokens_stride=work.short_tokens,
            FOLD=max(1, min(4, FOLD_NUMBERS // (blocks.rows * shape.size_block))),
            **self._of_step(step),
            **self._of_blocks(blocks),
        )

    def long(self, work: Work, step: Step) -> None:
        attend_tiles[(len(work.tiles) * self._places(self._long),)](
            tiles=work.tiles,
            **self._of_step(step),
            **self._of_blocks(self._long),
        )

    def _places(self, blocks: Blocks) -> int:
        return self._kv_heads * self._shape.parts(blocks)

    def _section_rows(self, work: Work) -> int:
        """Return the rows of scratch memory; how many are used changes no other's place."""
        rows = work.short_tokens * self._shape.part_heads(self._short)
        return len(work.items) * self._places(self._short) * rows

    def _of_step(self, step: Step) -> dict[str, Any]:
        results = step.results
        sinks = None if step.results.partial else step.sinks
        return self._common | {
            "outputs": results.output,
            "maxima": results.maximum,
            "denominators": results.denominator,
            "query": step.query,
            "query_token_stride": step.query.stride(0),
            "query_head_stride": step.query.stride(1),
            "page_ids": step.batch.page_ids,
            "sinks": step.query if sinks is None else sinks,
            "HAS_SINKS": sinks is not None,
            "PARTIAL": results.partial,
        }

    def _of_blocks(self, blocks: Blocks) -> dict[str, Any]:
        limits = {} if blocks.registers is None else {"maxnreg": blocks.registers}
        return limits | {
            "PARTS": self._shape.parts(blocks),
            "PART_HEADS": self._shape.part_heads(blocks),
            "M": blocks.rows,
            "N": blocks.span_tokens,
            "STAGES": blocks.stages,
            "num_warps": blocks.warps,
        }
