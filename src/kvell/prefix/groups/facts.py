"""The facts about a request besides its tokens: prompt length, images, remote tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IMAGE_COLUMNS = 3
"""Columns of an images array: first token in the text, tokens there, image tokens."""

Images = npt.NDArray[np.int32]
"""int32 [n, 3], in the order of the text, without overlap."""


@dataclass(frozen=True)
class ImageSpan:
    """One image: ``tokens`` tokens of the text from ``start`` on stand for ``image_tokens``.

    If image tokens are part of the text, the two counts are equal.  If the text cross-attends to
    them, one token of the text stands for all.  The ids of the span identify the image's content:
    equal ids, equal content.  If the span has more tokens than the image (text that is read
    together with it), the first ones identify it.

    :param start: first token of the text that stands for the image.
    :param tokens: tokens of the text that stand for it.
    :param image_tokens: tokens of the image itself.
    """

    start: int
    tokens: int
    image_tokens: int

    @property
    def end(self) -> int:
        """The first token of the text after the image."""
        return self.start + self.tokens


@dataclass(frozen=True)
class Facts:
    """A request's prompt length, images, and number of remote tokens.

    :param prompt_tokens: the length of the prompt; generated tokens follow it.
    :param images: in the order of the text, without overlap.
    :param away_tokens: the leading tokens whose pages in full attention groups are remote.
    """

    prompt_tokens: int
    images: tuple[ImageSpan, ...] = ()
    away_tokens: int = 0

    def begun(self, tokens: int) -> Iterable[ImageSpan]:
        """Return the images with at least one token among the first ``tokens`` of the text."""
        return (image for image in self.images if image.start < tokens)


def facts_of(num_tokens: int, prompt_tokens: int | None, images: Images | None) -> Facts:
    """Return the facts for the arguments of :meth:`MemoryCore.open`.

    :raises ValueError: if images overlap, are outside the tokens or are empty.
    """
    spans = tuple(ImageSpan(*row) for row in ([] if images is None else images.tolist()))
    before = 0
    for span in spans:
        if span.start < before or span.end > num_tokens or min(span.tokens, span.image_tokens) < 1:
            raise ValueError(f"image at token {span.start} overlaps, is empty or is outside")
        before = span.end
    return Facts(num_tokens if prompt_tokens is None else prompt_tokens, spans)
