"""Images of a request that need no encoder, because their embeddings are in the pool."""

from collections.abc import Sequence
from itertools import accumulate

from kvell.engine.requests.plan import NewPages
from kvell.memory import GroupKind, GroupSpec


def embedded_images(
    groups: Sequence[GroupSpec], held: NewPages, images: Sequence[tuple[int, int, int]]
) -> int:
    """Return how many leading images have all their pages when the request starts.

    :param held: int32 [m, 4], pages that the request starts with (columns of
        ``MemoryCore.held_pages``).
    :param images: (first token in the text, tokens there, image tokens), in order.
    """
    for index, group in enumerate(groups):
        positions = held[held[:, 1] == index, 2]
        if group.kind is GroupKind.VISION and len(positions):
            pages = (-(-tokens // group.page_tokens) for _, _, tokens in images)
            return sum(end <= int(positions.max()) + 1 for end in accumulate(pages))
    return 0
