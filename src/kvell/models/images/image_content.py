"""Images of a prompt by their content: what stands for them among a prompt's token ids.

A *span* is a run of a prompt that is told by content rather than by token ids alone: the
placeholders of an image, or a whole prompt that reads itself in both directions.  Equal
contents have equal ids, so a prefix is shared exactly where its images are the same.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int32]
Tensors = Mapping[str, torch.Tensor]
"""What a model's image processor made, by name."""

DIGEST_BYTES = 16
FIRST_BYTES = 4
"""Of a digest, those that make an id."""


@dataclass(frozen=True, eq=False)
class Image:
    """One image as the model's encoder takes it.

    :param tensors: processed pixels and what belongs to them.
    :param tokens: embeddings, or tokens that text attends to, that the encoder makes of it.
    :param grid: rows and columns of these, where their positions say them.
    """

    tensors: Tensors
    tokens: int
    grid: tuple[int, int] | None = None

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal tensors: names, dtypes, shapes and bytes."""
        told = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for name, tensor in sorted(self.tensors.items()):
            values = tensor.detach().cpu().contiguous()
            told.update(f"{name} {values.dtype} {tuple(values.shape)};".encode())
            told.update(values.flatten().view(torch.uint8).numpy().tobytes())
        return told.digest()


@dataclass(frozen=True, eq=False)
class Span:
    """A run of a prompt and the images that it is about.

    :param token_ids: int32 [tokens], the ids that the user gave, placeholders among them.
    :param images: in the order of their placeholders.
    :param placeholder: the id that stands for an image, or for a token of one.
    """

    token_ids: Ints
    images: tuple[Image, ...]
    placeholder: int

    @cached_property
    def image_tokens(self) -> int:
        """Of all its images."""
        return sum(image.tokens for image in self.images)

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal ids and images."""
        told = hashlib.blake2b(self.token_ids.astype("<i4").tobytes(), digest_size=DIGEST_BYTES)
        for image in self.images:
            told.update(image.digest)
        return told.digest()

    @cached_property
    def images_digest(self) -> bytes:
        """Equal for equal images, whatever text is about them."""
        told = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for image in self.images:
            told.update(image.digest)
        return told.digest()

    @cached_property
    def leads(self) -> bool:
        """Do all tokens of its images come before text that is about them?"""
        at = np.flatnonzero(self.token_ids != self.placeholder)
        return bool(len(at)) and int(at[0]) == self.image_tokens

    @cached_property
    def image_indices(self) -> Ints:
        """int32 [tokens]: at a placeholder, how many placeholders of the span come before it;
        elsewhere -1."""
        at = self.token_ids == self.placeholder
        return np.where(at, np.cumsum(at) - 1, -1).astype(np.int32)


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt as the engine takes it.

    :param token_ids: int32 [n], the ids of spans negative.
    :param images: for each span: first token, tokens, image tokens.
    """

    token_ids: Ints
    images: tuple[tuple[int, int, int], ...]


@dataclass
class ContentIds:
    """Negative ids for contents: made of the content, never the same for two of them.

    What was once named stays known, since the pages of a prefix outlive its requests.
    """

    _digests: dict[int, bytes] = field(default_factory=dict)

    def id_of(self, digest: bytes) -> int:
        """An id below 0, the same whenever the content is the same."""
        number = int.from_bytes(digest[:FIRST_BYTES], "little") >> 1
        while self._digests.setdefault(-1 - number, digest) != digest:
            number = (number + 1) % (1 << 31)
        return -1 - number
