"""Runs of layers whose parts of pages move together while a pass computes; pure.

A stage per layer would begin earliest, but a layer of a small model is some KiB of a page, and the
start of a copy costs more than the copy of that.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvell.pages.layout import GroupKind, GroupSpec

BY_LAYER = frozenset({GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED})
"""Kinds whose pages a pass reads and writes only layer by layer."""
MOST_STAGES = 8
"""Most stages of a model: a pass waits for an eighth of the fetched bytes before it starts."""
BEFORE_ALL = -1

Part = tuple[int, int]
"""First byte of a part of a page, and the byte after it."""


@dataclass(frozen=True)
class Stage:
    """Layers whose parts of pages move together.

    :param after_layer: the layer after which a pass needs them; BEFORE_ALL for the first.
    :param last_layer: the layer with which a pass has written them.
    :param parts: by group.
    """

    after_layer: int
    last_layer: int
    parts: Mapping[int, Part]


def stages_of(
    groups: Sequence[GroupSpec], model: str = "", most: int = MOST_STAGES
) -> tuple[Stage, ...]:
    """Cut a model's layers into stages, in the order in which it computes them."""
    own = [i for i, g in enumerate(groups) if g.model == model and g.kind in BY_LAYER]
    layers = sorted({layer for index in own for layer in groups[index].layers})
    count = min(most, len(layers))
    edges = [len(layers) * number // count for number in range(count)] if count else []
    return tuple(
        Stage(
            layers[begin - 1] if begin else BEFORE_ALL,
            layers[end - 1],
            {i: part for i in own if (part := _part(groups[i], layers[begin:end])) is not None},
        )
        for begin, end in pairwise([*edges, len(layers)])
    )


def num_written(stages: Sequence[Stage], layer: int) -> int:
    return bisect_right([stage.last_layer for stage in stages], layer)


def join_stages(stages: Sequence[Stage]) -> dict[int, Part]:
    """Return, by group, the part of a page that consecutive stages have together."""
    parts: dict[int, Part] = {}
    for stage in stages:
        for group, (begin, end) in stage.parts.items():
            parts[group] = parts.get(group, (begin, end))[0], end
    return parts


def _part(group: GroupSpec, layers: Sequence[int]) -> Part | None:
    """Return the bytes of consecutive layers inside a page; None without such a layer."""
    places = [place for place, layer in enumerate(group.layers) if layer in layers]
    if not places:
        return None
    return places[0] * group.layer_page_bytes, (places[-1] + 1) * group.layer_page_bytes
