"""Images of a prompt by content, and the ids that stand for them among its token ids.

A *span* is a run of a prompt identified by content rather than by token ids alone: the placeholders
of an image, or a whole prompt with attention in both directions. Equal contents have equal ids, so
a prefix is shared exactly as far as its images are equal.
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
"""Output of a model's image processor, by name."""

DIGEST_BYTES = 16
FIRST_BYTES = 4
"""Leading bytes of a digest that make an id."""


@dataclass(frozen=True, eq=False)
class Image:
    """One image in the form of the model's encoder.

    :param tensors: processed pixels and their metadata.
    :param tokens: number of embeddings, or of tokens to attend to, that the encoder makes.
    :param grid: rows and columns of these tokens, if images are grids; else None.
    """

    tensors: Tensors
    tokens: int
    grid: tuple[int, int] | None = None

    @cached_property
    def digest(self) -> bytes:
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for name, tensor in sorted(self.tensors.items()):
            values = tensor.detach().cpu().contiguous()
            hasher.update(f"{name} {values.dtype} {tuple(values.shape)};".encode())
            hasher.update(values.flatten().view(torch.uint8).numpy().tobytes())
        return hasher.digest()


@dataclass(frozen=True, eq=False)
class Span:
    """A run of a prompt and its images.

    :param token_ids: int32 [tokens], the ids that the user gave, placeholders among them.
    :param images: in the order of their placeholders.
    :param placeholder: the id that stands for an image, or for a token of one.
    """

    token_ids: Ints
    images: tuple[Image, ...]
    placeholder: int

    @cached_property
    def image_tokens(self) -> int:
        return sum(image.tokens for image in self.images)

    @cached_property
    def digest(self) -> bytes:
        return _digest_of(self.token_ids.astype("<i4").tobytes(), self.images)

    @cached_property
    def images_digest(self) -> bytes:
        return _digest_of(b"", self.images)

    @cached_property
    def leads(self) -> bool:
        """Whether all its image tokens precede its text."""
        at = np.flatnonzero(self.token_ids != self.placeholder)
        return bool(len(at)) and int(at[0]) == self.image_tokens

    @cached_property
    def image_indices(self) -> Ints:
        """int32 [tokens]: for a placeholder, the number of placeholders of the span before it; else
        -1."""
        at = self.token_ids == self.placeholder
        return np.where(at, np.cumsum(at) - 1, -1).astype(np.int32)


def _digest_of(first: bytes, images: tuple[Image, ...]) -> bytes:
    hasher = hashlib.blake2b(first, digest_size=DIGEST_BYTES)
    for image in images:
        hasher.update(image.digest)
    return hasher.digest()


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt in the engine's form.

    :param token_ids: int32 [n], with negative ids for spans.
    :param images: (first token, tokens, image tokens) of each span.
    """

    token_ids: Ints
    images: tuple[tuple[int, int, int], ...]


@dataclass
class ContentIds:
    """Negative ids derived from contents; no two contents share one.

    Ids are never removed, since the pages of a prefix outlive its requests.
    """

    _digests: dict[int, bytes] = field(default_factory=dict)

    def id_of(self, digest: bytes) -> int:
        """Return the id of a content, below 0; equal contents have equal ids."""
        number = int.from_bytes(digest[:FIRST_BYTES], "little") >> 1
        while self._digests.setdefault(-1 - number, digest) != digest:
            number = (number + 1) % (1 << 31)
        return -1 - number

    def digest_of(self, content: int) -> bytes:
        """Return the digest of the content that has an id.

        :raises KeyError: if none has it.
        """
        return self._digests[content]
