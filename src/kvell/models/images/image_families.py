"""Image processing of each family, over transformers' own encoders and projectors.

An image's embeddings replace its placeholders (*patches*, *pieces*), the same with row and column
positions (*grids*), the same in a prompt with attention in both directions (*prefix*), or separate
layers attend to the image's tokens and one placeholder marks the place (*cross*).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch

from kvell.models.images.image_content import Image, Ints, Span, Tensors
from kvell.models.images.image_grids import GridImages, PieceImages
from kvell.models.images.image_tensors import (
    on_device,
    runs,
    same_count,
    same_length,
    take_tensor,
    wrong,
)

ImageKind = Literal["patches", "pieces", "grids", "cross", "prefix"]


class ImageFamily(Protocol):
    """Interface to a family's images.

    :ivar placeholder: id of the tokens that stand for images.
    :ivar in_text: whether embeddings replace tokens of the text.
    :ivar both_directions: whether the tokens of a span attend to each other in both directions.
    :ivar in_grids: whether positions give a token's row and column in its image.
    :ivar first_position: position of a request's first token.
    """

    placeholder: int
    in_text: bool
    both_directions: bool
    in_grids: bool
    first_position: int

    def images(self, tensors: Tensors) -> tuple[Image, ...]:
        """Return the images of one prompt, from the tensors of the model's processor.

        :raises ChangeSomething: if a tensor is missing or has the wrong shape.
        """
        ...

    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        """Return (first token, span) in order.

        :raises ChangeSomething: if the prompt's placeholders do not match the images.
        """
        ...

    def encode(self, image: Image) -> torch.Tensor:
        """Run the encoder and the projector: [image tokens, hidden size of the text]."""
        ...


class PatchImages:
    """LLaVA-OneVision: the whole image, then its pieces at full size, a newline after each row."""

    in_text, both_directions, in_grids, first_position = True, False, False, 0

    def __init__(self, module: Any) -> None:
        self._model = module.model
        self.placeholder = int(module.config.image_token_id)

    def images(self, tensors: Tensors) -> tuple[Image, ...]:
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

    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        return runs(token_ids, images, self.placeholder, [image.tokens for image in images])

    def encode(self, image: Image) -> torch.Tensor:
        """Run the encoder and the projector: [image tokens, hidden size of the text]."""
        pixels = image.tensors["pixel_values"]
        output = self._model.get_image_features(
            on_device(self._model, pixels)[None],
            image.tensors["image_sizes"][None],
            batch_num_images=torch.tensor([1 if len(pixels) > 1 else 2]),
            return_dict=True,
        )
        features: torch.Tensor = output.pooler_output[0]
        return features

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


class PrefixImages:
    """PaliGemma: images, then text; the whole prompt has attention in both directions."""

    in_text, both_directions, in_grids, first_position = True, True, False, 1

    def __init__(self, module: Any) -> None:
        self._model = module.model
        self.placeholder = int(module.config.image_token_id)

    def images(self, tensors: Tensors) -> tuple[Image, ...]:
        """Take ``pixel_values`` [images, 3, H, W]."""
        pixels = take_tensor(tensors, "pixel_values", 4)
        vision = self._model.config.vision_config
        count = (vision.image_size // vision.patch_size) ** 2
        return tuple(Image({"pixel_values": image_pixels}, count) for image_pixels in pixels)

    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        """Return one span: every token's keys and values depend on the whole prompt."""
        placeholders = int(np.count_nonzero(token_ids == self.placeholder))
        same_count(placeholders, sum(image.tokens for image in images), self.placeholder)
        return [(0, Span(token_ids, tuple(images), self.placeholder))]

    def encode(self, image: Image) -> torch.Tensor:
        """Run the encoder and the projector: [image tokens, hidden size of the text]."""
        pixels = on_device(self._model, image.tensors["pixel_values"])
        features: torch.Tensor = self._model.get_image_features(pixels[None]).pooler_output[0]
        return features


class CrossImages:
    """Llama 3.2 Vision: separate layers attend to the tiles of an image."""

    in_text, both_directions, in_grids, first_position = False, False, False, 0

    def __init__(self, module: Any) -> None:
        self._model = module.model
        self.placeholder = int(module.config.image_token_id)

    def images(self, tensors: Tensors) -> tuple[Image, ...]:
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

    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        return runs(token_ids, images, self.placeholder, [1] * len(images))

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


FAMILIES: Mapping[ImageKind, Callable[[Any], ImageFamily]] = {
    "patches": PatchImages,
    "pieces": PieceImages,
    "grids": GridImages,
    "cross": CrossImages,
    "prefix": PrefixImages,
}
