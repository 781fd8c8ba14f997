"""Small layouts whose numbers can be checked by hand."""

import math
from collections.abc import Sequence

from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec, Layout
from kvell.pages.pool import Key, PagePool


def group(page_tokens: int, pages_per_large: int, window: int = 0) -> GroupSpec:
    """A group of one layer; its strides are set by :func:`pool_of`."""
    kind = GroupKind.SLIDING if window else GroupKind.FULL
    return GroupSpec("group", kind, (0,), 64, page_tokens, 0, pages_per_large, window)


def pool_of(num_large: int, *groups: GroupSpec) -> Layout:
    """A pool of large pages that all the groups divide."""
    large = 64 * math.lcm(*(g.pages_per_large for g in groups))
    return Layout(tuple(_named(i, g, large) for i, g in enumerate(groups)), large, num_large)


def _named(index: int, spec: GroupSpec, large: int) -> GroupSpec:
    stride = large // spec.pages_per_large
    return GroupSpec(
        f"g{index}",
        spec.kind,
        (index,),
        max(1, stride // spec.page_tokens),
        spec.page_tokens,
        stride,
        spec.pages_per_large,
        spec.window_tokens,
    )


def layers(windows: Sequence[int], head_size: int = 256, kv_heads: int = 1) -> list[LayerSpec]:
    """bf16 layers with these windows (0: full attention)."""
    return [
        LayerSpec(i, GroupKind.SLIDING if w else GroupKind.FULL, kv_heads, head_size, 2, w)
        for i, w in enumerate(windows)
    ]


class Recorder:
    """Hears what the evictor would hear."""

    def __init__(self) -> None:
        self.pages: list[tuple[int, int, Key]] = []
        self.larges: list[int] = []

    def cached(self, group: int, page: int, key: Key) -> None:
        self.pages.append((group, page, key))

    def evictable(self, large: int) -> None:
        self.larges.append(large)


def recorded_pool(num_large: int, *groups: GroupSpec) -> tuple[PagePool, Recorder]:
    """A pool and what it told its observer."""
    recorder = Recorder()
    return PagePool(pool_of(num_large, *groups), recorder), recorder
