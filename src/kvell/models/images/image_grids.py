"""Families whose images are pieces or grids of text tokens.

Positions of tokens if images are grids: (time, row, column) instead of one number.

::

    token      0  1  2 │ 3  4  5  6  7  8 │ 9  10      an image of 2 × 3 tokens at 3
    time       0  1  2 │ 3  3  3  3  3  3 │ 6  7
    row        0  1  2 │ 3  3  3  4  4  4 │ 6  7
    column     0  1  2 │ 3  4  5  3  4  5 │ 6  7

The text continues after the longer side, so a later token's position depends on all images before
it, and on nothing else (Qwen2-VL, arXiv:2409.12191, §2.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvell.errors import ChangeSomething
from kvell.models.config.multimodal import MOST_GRID_TOKENS
from kvell.models.images.image_content import Image, Ints, Span, Tensors
from kvell.models.images.image_tensors import on_device, runs, take_tensor, wrong


class PieceImages:
    """InternVL: an image is split into pieces of one size, each with as many placeholders.

    The processor does not record which pieces belong to one image, and nothing depends on it: each
    piece is stored and found as an image of its own.
    """

    in_text, both_directions, in_grids, first_position = True, False, False, 0

    def __init__(self, module: Any) -> None:
        self._model = module.model
        self.placeholder = int(module.config.image_token_id)

    def images(self, tensors: Tensors) -> tuple[Image, ...]:
        """Take ``pixel_values`` [pieces of all images, 3, H, W]."""
        pixels = take_tensor(tensors, "pixel_values", 4)
        vision = self._model.config.vision_config
        if tuple(pixels.shape[2:]) != tuple(vision.image_size):
            raise wrong(
                "pixel_values", tuple(pixels.shape), f"are not of {tuple(vision.image_size)} pixels"
            )
        sides = zip(vision.image_size, vision.patch_size, strict=True)
        ratio = self._model.config.downsample_ratio
        rows, columns = (int(side // patch * ratio) for side, patch in sides)
        return tuple(Image({"pixel_values": piece}, rows * columns) for piece in pixels)

    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        return runs(token_ids, images, self.placeholder, [image.tokens for image in images])

    def encode(self, image: Image) -> torch.Tensor:
        """Run the encoder and the projector: [image tokens, hidden size of the text]."""
        pixels = on_device(self._model, image.tensors["pixel_values"])
        output = self._model.get_image_features(pixels[None], return_dict=True)
        features: torch.Tensor = output.pooler_output[0]
        return features


class GridImages:
    """Qwen2-VL and Qwen2.5-VL: images of any size, with row and column positions."""

    in_text, both_directions, in_grids, first_position = True, False, True, 0

    def __init__(self, module: Any) -> None:
        self._model = module.model
        self.placeholder = int(module.config.image_token_id)
        self._merged = int(module.config.vision_config.spatial_merge_size)

    def images(self, tensors: Tensors) -> tuple[Image, ...]:
        """Take pixels and grids.

        ``pixel_values`` [patches of all images, numbers of a patch] and ``image_grid_thw`` [images,
        3]: the number of patches in time, height and width. ``mm_token_type_ids`` is ignored: it
        marks the placeholders.
        """
        pixels, grids = (
            take_tensor(tensors, "pixel_values", 2),
            take_tensor(tensors, "image_grid_thw", 2),
        )
        shapes = [self._shape(grid) for grid in grids.tolist()]
        patches = [rows * columns * self._merged**2 for rows, columns in shapes]
        if sum(patches) != len(pixels):
            raise wrong("pixel_values", tuple(pixels.shape), f"are not of {sum(patches)} patches")
        return tuple(
            Image({"pixel_values": own, "image_grid_thw": grid}, rows * columns, (rows, columns))
            for own, grid, (rows, columns) in zip(
                torch.split(pixels, patches), grids, shapes, strict=True
            )
        )

    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        return runs(token_ids, images, self.placeholder, [image.tokens for image in images])

    def encode(self, image: Image) -> torch.Tensor:
        """Run the encoder and the projector: [image tokens, hidden size of the text]."""
        grid = image.tensors["image_grid_thw"].to(self._model.device)[None]
        pixels = on_device(self._model, image.tensors["pixel_values"])
        output = self._model.get_image_features(pixels, grid, return_dict=True)
        features: torch.Tensor = output.pooler_output[0]
        return features

    def _shape(self, grid: list[int]) -> tuple[int, int]:
        """Return rows and columns of tokens: each stands for a square of patches."""
        sides = grid[1:]
        if len(grid) != 3 or grid[0] != 1 or any(x < 1 or x % self._merged for x in sides):
            raise wrong("image_grid_thw", grid, f"is not 1 and two multiples of {self._merged}")
        rows, columns = (side // self._merged for side in sides)
        if rows * columns > MOST_GRID_TOKENS:
            raise ChangeSomething(
                "images.image_grid_thw",
                grid,
                f"is {rows * columns} tokens; memory is reserved for encoding {MOST_GRID_TOKENS}",
                "make the image smaller: give the processor fewer max_pixels",
            )
        return rows, columns


AXES = 3


@dataclass(frozen=True)
class Grid:
    """An image in a prompt.

    :param start: its first token.
    :param rows, columns: shape of its tokens, which are ordered row by row.
    """

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        """The first token after it."""
        return self.start + self.rows * self.columns

    @property
    def skipped(self) -> int:
        """The lag of positions behind token indices after the image."""
        return self.rows * self.columns - max(self.rows, self.columns)


def grid_positions(start: int, count: int, grids: Sequence[Grid]) -> npt.NDArray[np.int64]:
    """Return positions of tokens ``start … start+count-1`` of a request, int64 [3, count].

    :param grids: the request's images in order; those that begin later have no effect.
    """
    tokens = np.arange(start, start + count)
    positions = np.tile(tokens, (AXES, 1))
    skipped = 0
    for grid in grids:
        low, high = (min(max(edge, start), start + count) for edge in (grid.start, grid.end))
        inside = tokens[low - start : high - start] - grid.start
        at = grid.start - skipped
        rows, columns = np.divmod(inside, grid.columns)
        positions[:, low - start : high - start] = at + np.stack([0 * inside, rows, columns])
        positions[:, high - start :] -= grid.skipped
        skipped += grid.skipped
    return positions
