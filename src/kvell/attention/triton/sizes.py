"""Which block sizes a layer's heads get: powers of two, as Triton and tensor cores want them.

Measured on one H200 (``bench/gpu``); they decide speed, and rounding, never correctness.
"""

from dataclasses import dataclass

import torch

from kvell.attention.interface import LayerPages

MIN_BLOCK = 16
"""Least size of a matrix product's side."""


SECTION_TOKENS = 256
"""Positions of a section: enough programs for a GPU at batch 8, little scratch memory."""


@dataclass(frozen=True)
class Blocks:
    """Rows of a tile, positions of a span and of a section, and how a program runs."""

    rows: int
    span_tokens: int
    warps: int
    stages: int
    section_tokens: int = SECTION_TOKENS


@dataclass(frozen=True)
class HeadShape:
    """A layer's heads as kernels see them.

    :param size: numbers of a key; of a latent those that are its value.
    :param rest: numbers of a latent's key behind its value.
    :param group: query heads of a kv head.
    """

    size: int
    rest: int
    group: int

    @staticmethod
    def of(layer: LayerPages, heads: int) -> "HeadShape":
        """The shape of a layer under so many query heads."""
        size = layer.value_size or layer.head_size
        return HeadShape(size, layer.head_size - size, heads // layer.kv_heads)

    @property
    def size_block(self) -> int:
        """Power of two that holds ``size``."""
        return max(MIN_BLOCK, power_above(self.size))

    @property
    def rest_block(self) -> int:
        """Power of two that holds ``rest``."""
        return max(MIN_BLOCK, power_above(self.rest))

    def part_heads(self, blocks: Blocks) -> int:
        """Query heads that share a tile: all of a kv head's if they fit."""
        return min(self.group, blocks.rows)

    def parts(self, blocks: Blocks) -> int:
        """Tiles that the query heads of a kv head need."""
        return -(-self.group // self.part_heads(blocks))

    def tile_tokens(self, blocks: Blocks) -> int:
        """Tokens of a tile."""
        return blocks.rows // self.part_heads(blocks)


def power_above(number: int) -> int:
    """The smallest power of two that is not below a positive number; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()


def working_dtype(query: torch.dtype, layer: LayerPages) -> torch.dtype:
    """What matrix products are of: 16 bits if both sides are, float32 otherwise."""
    short = query in (torch.bfloat16, torch.float16)
    return query if short and (layer.dtype == query or layer.quantised) else torch.float32


def short_blocks(layer: LayerPages, shape: HeadShape, dtype: torch.dtype) -> Blocks:
    """For requests with few new tokens."""
    rows = min(64, max(MIN_BLOCK, power_above(shape.group)))
    if dtype == torch.float32:
        return Blocks(min(rows, 32), 32, 4, 1)
    if shape.size_block >= 512:
        return Blocks(min(rows, 32), 32, 8, 2)
    return Blocks(rows, 64, 8 if layer.quantised else 4, 3)


def long_blocks(layer: LayerPages, shape: HeadShape, dtype: torch.dtype) -> Blocks:
    """For requests with many new tokens."""
    if dtype == torch.float32:
        return Blocks(32, 32, 4, 1)
    if shape.size_block >= 512:
        return Blocks(64, 32, 8, 1)
    if shape.size_block >= 256:
        return Blocks(128, 64, 8, 2)
    return Blocks(128, 64, 8 if layer.quantised else 4, 3)
