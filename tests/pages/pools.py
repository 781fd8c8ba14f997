"""Small layouts whose numbers can be checked by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec, Layout
from kvell.pages.sizing import equal_shares


class Chunk(int):
    """A window that is the chunk of chunked-local attention."""


def kind_of(window: int) -> GroupKind:
    """What a window says of its group: 0 is full attention, a number slides."""
    if isinstance(window, Chunk):
        return GroupKind.CHUNKED
    return GroupKind.SLIDING if window else GroupKind.FULL


def group(page_tokens: int, pages_per_large: int, window: int = 0) -> GroupSpec:
    """A group of one layer; its strides are set by :func:`pool_of`."""
    kind = kind_of(window)
    return GroupSpec("group", kind, (0,), 64, page_tokens, 0, pages_per_large, int(window))


def state(slices: int, pages_per_large: int, **changes: Any) -> GroupSpec:
    layers = tuple(range(slices))
    spec = GroupSpec("group", GroupKind.STATE, layers, 64, 1, 0, pages_per_large)
    return replace(spec, layers_per_page=1, **changes)


def images(kind: GroupKind, page_tokens: int, pages_per_large: int) -> GroupSpec:
    """Keys and values, or embeddings, of image tokens."""
    return replace(group(page_tokens, pages_per_large), kind=kind)


def dropping(page_tokens: int, pages_per_large: int, budget: int, **changes: Any) -> GroupSpec:
    kind = GroupKind.DROPPING
    changes = {"kind": kind, "window_tokens": budget, **changes}
    return replace(group(page_tokens, pages_per_large), **changes)


def pool_of(num_large: int, *groups: GroupSpec) -> Layout:
    large = 64 * math.lcm(*(g.pages_per_large for g in groups))
    return Layout(tuple(_named(i, g, large) for i, g in enumerate(groups)), large, num_large)


def confined(layout: Layout) -> Layout:
    """The same pool, cut at start into equal shares."""
    quota = equal_shares([g.pages_per_large for g in layout.groups], layout.num_large_pages)
    return replace(layout, quota_large_pages=quota)


def literal(layout: Layout) -> Layout:
    """The same pool, in which everybody gets large pages of its own."""
    return replace(layout, association="literal")


def _named(index: int, spec: GroupSpec, large: int) -> GroupSpec:
    stride = large // spec.pages_per_large
    layers = tuple(range(100 * index, 100 * index + len(spec.layers)))
    return replace(
        spec,
        name=f"g{index}",
        layers=layers,
        layer_token_bytes=max(1, stride // spec.page_tokens),
        page_stride_bytes=stride,
    )


def layers(windows: Sequence[int], head_size: int = 256, kv_heads: int = 1) -> list[LayerSpec]:
    """bf16 layers with these windows (0: full attention)."""
    return [LayerSpec(i, kind_of(w), kv_heads, head_size, 2, int(w)) for i, w in enumerate(windows)]
