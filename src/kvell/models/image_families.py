"""How each family takes images, over transformers' own encoders and projectors.

Three ways: an image's embeddings take the places of its placeholders (*patches*), the same
in a prompt that reads itself in both directions (*prefix*), or layers of their own attend to
the image's tokens and one placeholder says where (*cross*).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch

from kvell.errors import ChangeSomething
from kvell.models.image_content import Image, Ints, Span, Tensors

ImageKind = Literal["patches", "cross", "prefix"]


class ImageFamily(Protocol):
    """What serving a family's images needs to know.

    :ivar placeholder: id of the tokens that stand for images.
    :ivar in_text: do embeddings take the places of tokens?
    :ivar both_directions: do the tokens of a span read each other in both directions?
    :ivar first_position: position of a request's first token.
    """

    placeholder: int
    in_text: bool
    both_directions: bool
    first_position: int

    def images(self, tensors: Tensors) -> tuple[Image, ...]:
        """The images of one prompt, from what the model's processor gives for it.

        :raises ChangeSomething: if a tensor is missing or of a wrong shape.
        """
        ...

    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        """(first token, span) in order.

        :raises ChangeSomething: if the prompt's placeholders are not those of the images.
        """
        ...

    def encode(self, image: Image) -> torch.Tensor:
        """Run the encoder and the projector: [image tokens, hidden size of the text]."""
        ...


class PatchImages:
    """LLaVA-OneVision: a picture and its parts at full size, a new line after each row."""

    in_text, both_directions, first_position = True, False, 0

    def __init__(self, module: Any) -> None:
        self._model = module.model
        self.placeholder = int(module.config.image_token_id)

    def images(self, tensors: Tensors) -> tuple[Image, ...]:
        """``pixel_values`` [images, pieces, 3, H, W] and ``image_sizes`` [images, 2].

        Several images of one prompt are not taken apart into pieces, as transformers does.
        """
        pixels, sizes = _named(tensors, "pixel_values", 5), _named(tensors, "image_sizes", 2)
        _same_length(pixels, sizes, "image_sizes")
        pieces = [self._pieces(size) if len(sizes) == 1 else 1 for size in sizes]
        if max(pieces, default=1) > pixels.shape[1]:
            raise _wrong("pixel_values", tuple(pixels.shape), f"hold no {max(pieces)} pieces")
        parts = [
            {"pixel_values": p[:n], "image_sizes": s}
            for p, s, n in zip(pixels, sizes, pieces, strict=True)
        ]
        return tuple(Image(part, self._count(part)) for part in parts)

    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        """Each image's run of placeholders."""
        return _runs(token_ids, images, self.placeholder, [image.tokens for image in images])

    def encode(self, image: Image) -> torch.Tensor:
        """See :class:`ImageFamily`."""
        pixels = image.tensors["pixel_values"]
        output = self._model.get_image_features(
            _for(self._model, pixels)[None],
            image.tensors["image_sizes"][None],
            batch_num_images=torch.tensor([1 if len(pixels) > 1 else 2]),
            return_dict=True,
        )
        features: torch.Tensor = output.pooler_output[0]
        return features

    def _pieces(self, size: torch.Tensor) -> int:
        """How many pieces, the whole picture among them, an image of a size (H, W) has."""
        config = self._model.config
        count = vars(sys.modules[type(self._model).__module__])["image_size_to_num_patches"]
        return int(count(size, config.image_grid_pinpoints, config.vision_config.image_size))

    def _count(self, part: Tensors) -> int:
        """transformers' own packing, over features of one number."""
        vision = self._model.config.vision_config
        side = vision.image_size // vision.patch_size
        empty = torch.empty(len(part["pixel_values"]), side * side, 1)
        _, counts = self._model.pack_image_features(
            [empty], part["image_sizes"][None], image_newline=torch.empty(1)
        )
        return int(counts[0])


class PrefixImages:
    """PaliGemma: images first, then text, and the whole prompt reads itself in both directions."""

    in_text, both_directions, first_position = True, True, 1

    def __init__(self, module: Any) -> None:
        self._model = module.model
        self.placeholder = int(module.config.image_token_id)

    def images(self, tensors: Tensors) -> tuple[Image, ...]:
        """``pixel_values`` [images, 3, H, W]."""
        pixels = _named(tensors, "pixel_values", 4)
        vision = self._model.config.vision_config
        count = (vision.image_size // vision.patch_size) ** 2
        return tuple(Image({"pixel_values": one}, count) for one in pixels)

    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        """One span: every token's keys and values depend on the whole prompt."""
        found = int(np.count_nonzero(token_ids == self.placeholder))
        _same_count(found, sum(image.tokens for image in images), self.placeholder)
        return [(0, Span(token_ids, tuple(images), self.placeholder))]

    def encode(self, image: Image) -> torch.Tensor:
        """See :class:`ImageFamily`."""
        pixels = _for(self._model, image.tensors["pixel_values"])
        features: torch.Tensor = self._model.get_image_features(pixels[None]).pooler_output[0]
        return features


class CrossImages:
    """Llama 3.2 Vision: tiles of an image, which layers of their own attend to."""

    in_text, both_directions, first_position = False, False, 0

    def __init__(self, module: Any) -> None:
        self._model = module.model
        self.placeholder = int(module.config.image_token_id)

    def images(self, tensors: Tensors) -> tuple[Image, ...]:
        """``pixel_values`` [1, images, tiles, 3, H, W], ``aspect_ratio_ids`` [1, images] and
        ``aspect_ratio_mask`` [1, images, tiles].

        ``cross_attention_mask`` is not taken: it follows from where placeholders stand.
        """
        pixels = _named(tensors, "pixel_values", 6)
        ids, mask = _named(tensors, "aspect_ratio_ids", 2), _named(tensors, "aspect_ratio_mask", 3)
        if len(pixels) != 1:
            raise _wrong("pixel_values", tuple(pixels.shape), "are of more than one prompt")
        for name, tensor in (("aspect_ratio_ids", ids), ("aspect_ratio_mask", mask)):
            _same_length(pixels[0], tensor[0], name)
        tiles = self._model.vision_model.num_patches
        return tuple(
            Image({"pixel_values": p, "aspect_ratio_ids": i, "aspect_ratio_mask": m}, n * tiles)
            for p, i, m, n in zip(pixels[0], ids[0], mask[0], mask[0].sum(-1).tolist(), strict=True)
        )

    def spans(self, token_ids: Ints, images: Sequence[Image]) -> list[tuple[int, Span]]:
        """One placeholder for each image."""
        return _runs(token_ids, images, self.placeholder, [1] * len(images))

    def encode(self, image: Image) -> torch.Tensor:
        """The tokens of the image's own tiles; those of tiles that only pad are left out."""
        tensors = image.tensors
        model = self._model
        states = model.vision_model(
            pixel_values=_for(model, tensors["pixel_values"])[None, None],
            aspect_ratio_ids=tensors["aspect_ratio_ids"].to(model.device)[None, None],
            aspect_ratio_mask=tensors["aspect_ratio_mask"].to(model.device)[None, None],
        ).last_hidden_state
        projected: torch.Tensor = model.multi_modal_projector(states)
        return projected.flatten(0, 3)[: image.tokens]


FAMILIES: Mapping[ImageKind, Callable[[Any], ImageFamily]] = {
    "patches": PatchImages,
    "cross": CrossImages,
    "prefix": PrefixImages,
}


def _runs(
    token_ids: Ints, images: Sequence[Image], placeholder: int, counts: Sequence[int]
) -> list[tuple[int, Span]]:
    """For each image the next so many placeholders, which stand together."""
    places = np.flatnonzero(token_ids == placeholder)
    _same_count(len(places), sum(counts), placeholder)
    spans, begin = [], 0
    for image, count in zip(images, counts, strict=True):
        own = places[begin : begin + count]
        if own[-1] - own[0] != count - 1:
            raise ChangeSomething(
                "prompt", "…", "has text among the tokens of an image", "keep them together"
            )
        begin += count
        start = int(own[0])
        spans.append((start, Span(token_ids[start : start + count], (image,), placeholder)))
    return spans


def _same_count(found: int, wanted: int, placeholder: int) -> None:
    if found != wanted:
        raise ChangeSomething(
            "prompt",
            f"{found} tokens of id {placeholder}",
            f"has not the {wanted} that its images stand for",
            "give token ids and tensors as the model's processor makes them together",
        )


def _named(tensors: Tensors, name: str, dimensions: int) -> torch.Tensor:
    if name not in tensors:
        raise _wrong(name, "nothing", "is missing")
    tensor = torch.as_tensor(tensors[name])
    if tensor.dim() != dimensions:
        raise _wrong(name, tuple(tensor.shape), f"must have {dimensions} dimensions")
    return tensor


def _same_length(left: torch.Tensor, right: torch.Tensor, name: str) -> None:
    if len(left) != len(right):
        raise _wrong(name, tuple(right.shape), f"is not of {len(left)} images")


def _wrong(name: str, value: object, problem: str) -> ChangeSomething:
    return ChangeSomething(
        f"images.{name}", value, problem, "give what the model's processor returns for the prompt"
    )


def _for(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    return pixels.to(model.device, model.dtype)
