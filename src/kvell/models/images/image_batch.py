"""Input of the forward pass for the images of one step."""

from dataclasses import dataclass, field

import torch

from kvell.attention.interface import GroupBatch
from kvell.models.images.image_content import Span


@dataclass(frozen=True)
class PageRows:
    """Rows inside pages of one group, int64 [n] each, on the pool's device."""

    page_ids: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True)
class SeenImages:
    """One image for each of some tokens of the step, which cross-attend to it.

    :param rows: int64 [n], the tokens.
    :param batch: each of these tokens as a request of its own whose context is its image.
    """

    rows: torch.Tensor
    batch: GroupBatch


@dataclass(frozen=True)
class ImageBatch:
    """Images of one step over T new tokens.

    :param begun: spans whose first token is in the step, and the rows for their image tokens.
    :param rows: int64 [m], tokens of the step whose input is a stored embedding.
    :param seen: each token's nearest image that it cross-attends to, then the one before it, …
    :param prefix_tokens: for each request, how many of its first tokens in the step attend to each
        other in both directions; () if there are none.
    :param positions: int64 [3, T], of every token, if images are grids; else None.
    """

    begun: tuple[tuple[Span, PageRows], ...]
    rows: torch.Tensor
    embeddings: PageRows
    seen: tuple[SeenImages, ...] = ()
    prefix_tokens: tuple[int, ...] = field(default=())
    positions: torch.Tensor | None = None
