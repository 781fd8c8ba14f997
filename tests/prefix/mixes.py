"""Mixes of layer groups, one for every rule that the core knows, and prompts that collide."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec, Layout
from kvell.pages.sizing import Manager, plan_layout
from tests.pages.pools import Chunk, dropping, group, images, kind_of, pool_of, state

PAGE_TOKENS = 4
CROSS, VISION = GroupKind.CROSS, GroupKind.VISION


def drafter(spec: GroupSpec) -> GroupSpec:
    """Refilled where it is not found."""
    return replace(spec, required_for_hit=False)


def of_model(name: str, *groups: GroupSpec) -> tuple[GroupSpec, ...]:
    return tuple(replace(spec, model=name) for spec in groups)


@dataclass(frozen=True)
class Mix:
    """Groups of a pool.

    :param image_scale: image tokens for each token that an image has in the text; 0 for
        no images.
    :param long: prompts reach the first cuts of state groups.
    """

    groups: tuple[GroupSpec, ...]
    image_scale: int = 0
    long: bool = False

    def layout(self, num_large: int) -> Layout:
        return pool_of(num_large, *self.groups)

    @property
    def models(self) -> list[str]:
        return sorted({spec.model for spec in self.groups})


MIXES = {
    "full": Mix((group(4, 2),)),
    "sliding": Mix((group(4, 3, 6),)),
    "windows": Mix((group(4, 2), group(2, 3, 5), group(4, 1, 14))),
    "chunks": Mix((group(4, 2), group(4, 3, Chunk(10)), group(2, 2, Chunk(8)))),
    "uneven": Mix((group(4, 2), group(6, 3, 9))),
    "tiny": Mix((group(1, 3, 3), group(2, 2, 1), group(3, 1, Chunk(4)))),
    "state": Mix((group(8, 2), state(1, 2)), long=True),
    "slices": Mix((group(8, 3), group(16, 2, 20), state(3, 4)), long=True),
    "states": Mix((group(16, 4), state(1, 3), state(2, 2)), long=True),
    "only states": Mix((state(2, 3),), long=True),
    "cross": Mix((group(4, 3), images(CROSS, 4, 2)), 3),
    "merged": Mix((group(4, 2), group(4, 2, 7), images(VISION, 2, 3)), 1),
    "in pages": Mix((replace(group(4, 2), holds_embeddings=True), group(2, 3, 6)), 1),
    "paged images": Mix((replace(group(4, 3), counts_images=True), state(1, 2)), 3),
    "image states": Mix((group(8, 2), images(CROSS, 8, 2), state(2, 3)), 2, long=True),
    "dropping": Mix((dropping(4, 3, 12), group(4, 2))),
    "only dropping": Mix((dropping(4, 2, 9),)),
    "drafter": Mix((group(4, 2), drafter(group(4, 3)), drafter(group(2, 2, 7)))),
    "state drafter": Mix((group(8, 2), drafter(state(2, 3))), long=True),
    "two models": Mix(
        (
            *of_model("big", group(4, 2), group(4, 3, 9), state(2, 2)),
            *of_model("small", group(4, 4), images(CROSS, 2, 4)),
        ),
        2,
    ),
}
LATECOMERS = of_model("late", group(4, 6), group(4, 12, 6), state(1, 4))
"""Groups of a model that is registered later; they divide every large page here (see `late`)."""


def late(layout: Layout) -> list[GroupSpec]:
    fitting = (s for s in LATECOMERS if layout.large_page_bytes % s.pages_per_large == 0)
    return [
        replace(
            spec,
            name=f"late{index}",
            layers=tuple(range(900 + index, 901 + index)),
            page_stride_bytes=layout.large_page_bytes // spec.pages_per_large,
        )
        for index, spec in enumerate(fitting)
    ]


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    images: npt.NDArray[np.int32]


def text(*tokens: int) -> Prompt:
    return Prompt(list(tokens), np.empty((0, 3), np.int32))


def prompt_of(bits: int, repeats: int, tail: int) -> list[int]:
    """Up to 57 tokens of a two-letter alphabet: long common beginnings, odd ends."""
    head = [bits >> i & 1 for i in range(6)]
    return (
        head[: 1 + bits % 6] + [1, 0, 1] * (3 * repeats) + [tail >> i & 1 for i in range(tail % 5)]
    )


def with_images(tokens: Sequence[int], places: Sequence[int], scale: int) -> Prompt:
    """Images put into a text; the ids of an image tell its content, and so how large it is."""
    text: list[int] = []
    rows: list[tuple[int, int, int]] = []
    cuts = sorted(place % (len(tokens) + 1) for place in places)
    for start, end, place in zip([0, *cuts], [*cuts, len(tokens)], [*places, None], strict=True):
        text.extend(tokens[start:end])
        if place is not None:
            content = 1 + place % 3
            count = 1 + content % 3 if scale > 1 else 2 * content
            rows.append((len(text), count, count * scale))
            text.extend([-content] * count)
    return Prompt([*text, 1], np.asarray(rows, np.int32).reshape(-1, 3))


def small_layout(
    windows: list[int], sizes: list[int], num_large: int, manager: Manager = "kvell"
) -> Layout:
    """Groups with these windows (0: full) and KV heads, in a pool of so many large pages."""
    layers = [
        LayerSpec(i, kind_of(w), size, 8, 2, int(w))
        for i, (w, size) in enumerate(zip(windows, sizes, strict=True))
    ]
    wide = plan_layout(layers, 1 << 20, page_tokens=PAGE_TOKENS, manager=manager)
    pool_bytes = wide.large_page_bytes * num_large
    return plan_layout(layers, pool_bytes, page_tokens=PAGE_TOKENS, manager=manager)
