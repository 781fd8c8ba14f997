"""Block sizes for a layer's heads: powers of two, as Triton and tensor cores need them.

Measured on one H200 (``bench/gpu``).  They affect speed and rounding, not correctness.
"""

from dataclasses import dataclass

import torch

from kvell.attention.interface import LayerPages

MIN_BLOCK = 16
"""The smallest dimension of a matrix product."""


SECTION_TOKENS = 256
"""Positions of a section: enough programs for a GPU at batch 8, with little scratch memory."""


REGISTERS = {64: 128, 128: 168}
"""Registers of a thread by head size, so that four or three programs of 4 warps share a
multiprocessor.  The compiler takes more without need."""


@dataclass(frozen=True)
class Blocks:
    """Rows of a tile, positions of a span and of a section, and how a program runs.

    :param registers: limit of a thread's registers, or None for the compiler's choice.
    """

    rows: int
    span_tokens: int
    warps: int
    stages: int
    section_tokens: int = SECTION_TOKENS
    registers: int | None = None


@dataclass(frozen=True)
class HeadShape:
    """A layer's heads as arguments of kernels.

    :param size: length of a key, or of a latent's value.
    :param rest: length of a latent's key after its value.
    :param group: query heads of a kv head.
    """

    size: int
    rest: int
    group: int

    @staticmethod
    def of(layer: LayerPages, heads: int) -> "HeadShape":
        size = layer.value_size or layer.head_size
        return HeadShape(size, layer.head_size - size, heads // layer.kv_heads)

    @property
    def size_block(self) -> int:
        return max(MIN_BLOCK, power_above(self.size))

    @property
    def rest_block(self) -> int:
        return max(MIN_BLOCK, power_above(self.rest))

    def part_heads(self, blocks: Blocks) -> int:
        return min(self.group, blocks.rows)

    def parts(self, blocks: Blocks) -> int:
        return -(-self.group // self.part_heads(blocks))

    def tile_tokens(self, blocks: Blocks) -> int:
        return blocks.rows // self.part_heads(blocks)


def power_above(number: int) -> int:
    """Return the smallest power of two that is not below ``number``; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()


def working_dtype(query: torch.dtype, layer: LayerPages) -> torch.dtype:
    """Return the dtype of matrix products: 16 bits if query and layer allow it, else float32."""
    short = query in (torch.bfloat16, torch.float16)
    return query if short and (layer.dtype == query or layer.quantised) else torch.float32


def short_blocks(layer: LayerPages, shape: HeadShape, dtype: torch.dtype) -> Blocks:
    rows = min(64, max(MIN_BLOCK, power_above(shape.group)))
    if dtype == torch.float32:
        return Blocks(min(rows, 32), 32, 4, 1)
    if shape.size_block >= 512:
        return Blocks(min(rows, 32), 32, 8, 2)
    if layer.quantised:
        return Blocks(rows, 64, 8, 3)
    registers = REGISTERS.get(shape.size_block) if rows == MIN_BLOCK else None
    return Blocks(rows, 64, 4, 3, registers=registers)


def long_blocks(layer: LayerPages, shape: HeadShape, dtype: torch.dtype) -> Blocks:
    if dtype == torch.float32:
        return Blocks(32, 32, 4, 1)
    if shape.size_block >= 512:
        return Blocks(64, 32, 8, 1)
    return Blocks(128, 64, 8, 3)  # with 4 warps registers spill
