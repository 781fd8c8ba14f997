"""From layers to a layout: groups, page sizes and the large page that they divide.

Source: Jenga §4.4 (why the least common multiple); ADR 1.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from kvell.errors import ChangeSomething
from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec, Layout
from kvell.pages.shares import equal_shares
from kvell.vocabulary import KIB, MIB

Manager = Literal["kvell", "jenga", "paged", "max-page", "static"]
"""Configurations of the one allocator.

``kvell``: a group per kind, window and size, associated by demand.  ``jenga``: the
same groups, allocated in the literal order of Jenga §5.4.  ``paged``: one page size,
every layer holds every token.  ``max-page``: every group's page is padded to the
largest.  ``static``: memory is cut at start, the same number of pages for each group.
"""
MANAGERS: tuple[Manager, ...] = get_args(Manager)

DEFAULT_PAGE_TOKENS = 16
ALIGNMENT_BYTES = 64
"""Pages start on cache lines."""
MAX_PADDING = 0.01
"""Padding that may buy a smaller large page, as a fraction of a page."""
TAME_FACTOR = 8
"""A least common multiple up to this many of the largest pages is taken as it is."""


def plan_layout(
    layers: Sequence[LayerSpec],
    kv_memory_bytes: int,
    *,
    manager: Manager = "kvell",
    page_tokens: int = DEFAULT_PAGE_TOKENS,
) -> Layout:
    """Cut ``kv_memory_bytes`` into large pages that every group of ``layers`` divides.

    :param manager: see :data:`Manager`.
    :raises ChangeSomething: if there is not even one page for each group that must have
        its own, or if there are no layers.
    """
    if manager not in MANAGERS:
        raise ChangeSomething(
            "--manager", manager, "is not a manager", f"use one of {', '.join(MANAGERS)}"
        )
    layers = [layer for layer in layers if layer.kv_of is None]
    if not layers:
        raise ChangeSomething("model", "no layers", "stores no KV cache", "use a decoder model")
    drafts = _one_group(layers, page_tokens) if manager == "paged" else _groups(layers, page_tokens)
    page_bytes = [_align(draft.page_bytes) for draft in drafts]
    if manager == "max-page":
        page_bytes = [max(page_bytes)] * len(page_bytes)
    large_page_bytes, rule = choose_large_page_bytes(page_bytes, kv_memory_bytes)
    num_large_pages = kv_memory_bytes // large_page_bytes
    _require_pages(kv_memory_bytes, large_page_bytes, len(drafts) if manager == "static" else 1)
    groups = tuple(_fit(d, p, large_page_bytes) for d, p in zip(drafts, page_bytes, strict=True))
    quota = equal_shares([group.pages_per_large for group in groups], num_large_pages)
    return Layout(
        groups,
        large_page_bytes,
        num_large_pages,
        "max-page" if manager == "max-page" else rule,
        "literal" if manager == "jenga" else "demand",
        quota if manager == "static" else None,
    )


def _require_pages(kv_memory_bytes: int, large_page_bytes: int, count: int) -> None:
    if kv_memory_bytes >= count * large_page_bytes:
        return
    raise ChangeSomething(
        "--kv-memory",
        f"{kv_memory_bytes}B",
        "is smaller than one page of this model" + (" for each layer group" * (count > 1)),
        f"use at least {-(-count * large_page_bytes // KIB)}KiB",
    )


def choose_large_page_bytes(page_bytes: Sequence[int], pool_bytes: int) -> tuple[int, str]:
    """Size of the large page for small pages of ``page_bytes``, and the rule that chose it.

    Rules, in order: ``lcm`` when the least common multiple is small; ``padded``, the
    smallest size that wastes at most 1 % of any page (the multiple itself wastes none);
    ``largest-page`` when nothing else stays below 1/64 of the pool.
    """
    cap = min(pool_bytes // 64, max(64 * MIB, pool_bytes // 256))
    largest = max(page_bytes)
    lcm = math.lcm(*page_bytes)
    if lcm <= min(cap, TAME_FACTOR * largest) or lcm == largest:
        return lcm, "lcm"
    for size in _padded_sizes(page_bytes, cap):
        return size, "padded"
    return _largest_page(page_bytes), "largest-page"


def _padded_sizes(page_bytes: Sequence[int], cap: int) -> Iterator[int]:
    largest = max(page_bytes)
    for count in range(1, cap // largest + 1):
        counts = [count * largest // p for p in page_bytes]
        unit = ALIGNMENT_BYTES * math.lcm(*counts)
        size = -(-max(c * p for c, p in zip(counts, page_bytes, strict=True)) // unit) * unit
        padding = max(size / (c * p) - 1 for c, p in zip(counts, page_bytes, strict=True))
        if size <= cap and padding <= MAX_PADDING:
            yield size


def _largest_page(page_bytes: Sequence[int]) -> int:
    largest = max(page_bytes)
    unit = ALIGNMENT_BYTES * math.lcm(*(largest // p for p in page_bytes))
    return -(-largest // unit) * unit


def _groups(layers: Sequence[LayerSpec], page_tokens: int) -> list[GroupSpec]:
    members: dict[tuple[GroupKind, int, int], list[int]] = {}
    for layer in layers:
        key = (layer.kind, layer.window_tokens, layer.token_bytes)
        members.setdefault(key, []).append(layer.index)
    names = _names(list(members))
    return [
        _draft(name, kind, tuple(indices), token_bytes, page_tokens, window)
        for name, ((kind, window, token_bytes), indices) in zip(names, members.items(), strict=True)
    ]


def _names(keys: Sequence[tuple[GroupKind, int, int]]) -> list[str]:
    plain = [f"{kind}({window})" if window else str(kind) for kind, window, _ in keys]
    return [
        name if plain.count(name) == 1 else f"{name}/{size}B"
        for name, (_, _, size) in zip(plain, keys, strict=True)
    ]


def _one_group(layers: Sequence[LayerSpec], page_tokens: int) -> list[GroupSpec]:
    indices = tuple(layer.index for layer in layers)
    token_bytes = max(layer.token_bytes for layer in layers)
    return [_draft("all", GroupKind.FULL, indices, token_bytes, page_tokens, 0)]


def _draft(
    name: str,
    kind: GroupKind,
    indices: tuple[int, ...],
    token_bytes: int,
    page_tokens: int,
    window: int,
) -> GroupSpec:
    return GroupSpec(name, kind, indices, token_bytes, page_tokens, 0, 0, window)


def _fit(draft: GroupSpec, page_bytes: int, large_page_bytes: int) -> GroupSpec:
    count = large_page_bytes // page_bytes
    while large_page_bytes % (count * ALIGNMENT_BYTES):
        count -= 1
    return GroupSpec(
        draft.name,
        draft.kind,
        draft.layers,
        draft.layer_token_bytes,
        draft.page_tokens,
        large_page_bytes // count,
        count,
        draft.window_tokens,
    )


def _align(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
