"""Image processing of each family, over transformers' own encoders and projectors.

An image's embeddings replace its placeholders (*patches*, *pieces*), the same with row and column
positions (*grids*), the same in a prompt with attention in both directions (*prefix*), or separate
layers attend to the image's tokens and one placeholder marks the place (*cross*).
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from typing_extensions import override

from kvell.errors import ChangeSomething
from kvell.models.config.multimodal import MOST_GRID_TOKENS
from kvell.models.images.image_content import Image, Ints, Span, Tensors
from kvell.models.images.image_tensors import (
    on_device,
    runs,
    same_count,
    same_length,
    take_tensor,
    wrong,
)

ImageKind = Literal["patches", "pieces", "grids", "cross", "prefix"]


class ImageFamily(ABC):
    """A family's images.

    :ivar placeholder: id of the tokens that stand for images.
    :ivar in_text: whether embeddings replace tokens of the text.
    :ivar both_directions: whether the tokens of a span attend to each other in both directions.
    :ivar in_grids: whether positions give a token's row and column in its image.
    :ivar first_position: position of a request's first token.
    """

    in_text = True
    both_directions = False
    in_grids = False
    first_position = 0

    def __init__(self, module: Any) -> None:
        self._model = module.model
        self.placeholder = int(module.config.image_token_id)

    @abstractmethod
    def read_images(self, tensors: Tensors) -> tuple[Image, ...]:
        """Return the images of one prompt, from the tensors of the model's processor.

        :raises ChangeSomething: if a tensor is missing or has the wrong shape.
        """

    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        """Return (first token, span) in order.

        :raises ChangeSomething: if the prompt's placeholders do not match the images.
        """
        return runs(token_ids, images, self.placeholder, [image.tokens for image in images])

    def encode(self, image: Image) -> torch.Tensor:
        """Run the encoder and the projector: [image tokens, hidden size of the text]."""
        return self._features(on_device(self._model, image.tensors["pixel_values"])[None])

    def _features(self, *inputs: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        output = self._model.get_image_features(*inputs, return_dict=True, **more)
        features: torch.Tensor = output.pooler_output[0]
        return features


class PatchImages(ImageFamily):
    """LLaVA-OneVision: the whole image, then its pieces at full size, a newline after each row."""

    @override
    def read_images(self, tensors: Tensors) -> tuple[Image, ...]:
        """Take ``pixel_values`` [images, pieces, 3, H, W] and ``image_sizes`` [images, 2].

        As in transformers, several images of one prompt are not split into pieces.
        """
        pixels, sizes = (
            take_tensor(tensors, "pixel_values", 5),
            take_tensor(tensors, "image_sizes", 2),
        )
        same_length(pixels, sizes, "image_sizes")
        pieces = [self._pieces(size) if len(sizes) == 1 else 1 for size in sizes]
        if max(pieces, default=1) > pixels.shape[1]:
            raise wrong("pixel_values", tuple(pixels.shape), f"hold no {max(pieces)} pieces")
        parts = [
            {"pixel_values": p[:n], "image_sizes": s}
            for p, s, n in zip(pixels, sizes, pieces, strict=True)
        ]
        return tuple(Image(part, self._count(part)) for part in parts)

    @override
    def encode(self, image: Image) -> torch.Tensor:
        pixels = image.tensors["pixel_values"]
        return self._features(
            on_device(self._model, pixels)[None],
            image.tensors["image_sizes"][None],
            batch_num_images=torch.tensor([1 if len(pixels) > 1 else 2]),
        )

    def _pieces(self, size: torch.Tensor) -> int:
        config = self._model.config
        count = vars(sys.modules[type(self._model).__module__])["image_size_to_num_patches"]
        return int(count(size, config.image_grid_pinpoints, config.vision_config.image_size))

    def _count(self, part: Tensors) -> int:
        """Return the image tokens, counted by transformers' own packing of features of size 1."""
        vision = self._model.config.vision_config
        side = vision.image_size // vision.patch_size
        empty = torch.empty(len(part["pixel_values"]), side * side, 1)
        _, counts = self._model.pack_image_features(
            [empty], part["image_sizes"][None], image_newline=torch.empty(1)
        )
        return int(counts[0])


class PrefixImages(ImageFamily):
    """PaliGemma: images, then text; the whole prompt has attention in both directions."""

    both_directions = True
    first_position = 1

    @override
    def read_images(self, tensors: Tensors) -> tuple[Image, ...]:
        """Take ``pixel_values`` [images, 3, H, W]."""
        pixels = take_tensor(tensors, "pixel_values", 4)
        vision = self._model.config.vision_config
        count = (vision.image_size // vision.patch_size) ** 2
        return tuple(Image({"pixel_values": image_pixels}, count) for image_pixels in pixels)

    @override
    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        """Return one span: every token's keys and values depend on the whole prompt."""
        placeholders = int(np.count_nonzero(token_ids == self.placeholder))
        same_count(placeholders, sum(image.tokens for image in images), self.placeholder)
        return [(0, Span(token_ids, tuple(images), self.placeholder))]


class CrossImages(ImageFamily):
    """Llama 3.2 Vision: separate layers attend to the tiles of an image."""

    in_text = False

    @override
    def read_images(self, tensors: Tensors) -> tuple[Image, ...]:
        """Take pixels, aspect ratios and the mask of tiles.

        ``pixel_values`` [1, images, tiles, 3, H, W], ``aspect_ratio_ids`` [1, images] and
        ``aspect_ratio_mask`` [1, images, tiles].  ``cross_attention_mask`` is ignored: it
        follows from the positions of placeholders.
        """
        pixels = take_tensor(tensors, "pixel_values", 6)
        ids, mask = (
            take_tensor(tensors, "aspect_ratio_ids", 2),
            take_tensor(tensors, "aspect_ratio_mask", 3),
        )
        if len(pixels) != 1:
            raise wrong("pixel_values", tuple(pixels.shape), "are of more than one prompt")
        for name, tensor in (("aspect_ratio_ids", ids), ("aspect_ratio_mask", mask)):
            same_length(pixels[0], tensor[0], name)
        tiles = self._model.vision_model.num_patches
        return tuple(
            Image({"pixel_values": p, "aspect_ratio_ids": i, "aspect_ratio_mask": m}, n * tiles)
            for p, i, m, n in zip(pixels[0], ids[0], mask[0], mask[0].sum(-1).tolist(), strict=True)
        )

    @override
    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        return runs(token_ids, images, self.placeholder, [1] * len(images))

    @override
    def encode(self, image: Image) -> torch.Tensor:
        """Return the tokens of the image's own tiles, without those of padding tiles."""
        tensors = image.tensors
        model = self._model
        states = model.vision_model(
            pixel_values=on_device(model, tensors["pixel_values"])[None, None],
            aspect_ratio_ids=tensors["aspect_ratio_ids"].to(model.device)[None, None],
            aspect_ratio_mask=tensors["aspect_ratio_mask"].to(model.device)[None, None],
        ).last_hidden_state
        projected: torch.Tensor = model.multi_modal_projector(states)
        return projected.flatten(0, 3)[: image.tokens]


class PieceImages(ImageFamily):
    """InternVL: an image is split into pieces of one size, each with as many placeholders.

    The processor does not record which pieces belong to one image, and nothing depends on it: each
    piece is stored and found as an image of its own.
    """

    @override
    def read_images(self, tensors: Tensors) -> tuple[Image, ...]:
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


class GridImages(ImageFamily):
    """Qwen2-VL and Qwen2.5-VL: images of any size, with row and column positions."""

    in_grids = True

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._merged = int(module.config.vision_config.spatial_merge_size)

    @override
    def read_images(self, tensors: Tensors) -> tuple[Image, ...]:
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

    @override
    def encode(self, image: Image) -> torch.Tensor:
        grid = image.tensors["image_grid_thw"].to(self._model.device)[None]
        return self._features(on_device(self._model, image.tensors["pixel_values"]), grid)

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


FAMILIES: Mapping[ImageKind, type[ImageFamily]] = {
    "patches": PatchImages,
    "pieces": PieceImages,
    "grids": GridImages,
    "cross": CrossImages,
    "prefix": PrefixImages,
}
