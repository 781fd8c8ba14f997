"""Requests that must be served where their prompt is computed."""

from collections.abc import Sequence

from kvell.engine.requests.request import Request
from kvell.memory import GroupKind, GroupSpec

MOVABLE = frozenset(GroupKind) - {GroupKind.DROPPING}
"""Kinds whose pages are all the state of computed tokens; embeddings are not needed any more."""


def staying_reason(request: Request, groups: Sequence[GroupSpec]) -> str:
    """Return why a request must be served where its prompt is computed; "" if it can move."""
    seen = [group for group in groups if group.model == request.model]
    if request.spec.images and any(group.counts_images for group in seen):
        return "its pages hold images among the text"
    if request.is_scored:
        return "its prompt logprobs are reported here"
    if request.spec.pooling:
        return "it generates no tokens"
    if any(group.kind not in MOVABLE for group in seen):
        return "its model has pages that cannot be moved yet"
    return ""
