"""From layers to groups: which layers share a page, and what one page of each group holds.

Groups come out as *drafts*: without the stride and count that the large page decides.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from kvell.errors import ChangeSomething
from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec

ALIGNMENT_BYTES = 64
"""Pages start on cache lines."""

Embeddings = Literal["own", "in-kv"]
"""Where embeddings of image tokens wait: in pages of their own, or in the pages of the keys
and values that will overwrite them."""


@dataclass(frozen=True)
class Draft:
    """A group before its large page is known.

    :param group: stride and pages per large page are still 0.
    :param page_bytes: what a page takes, aligned; more than ``group.page_bytes`` where a
        manager pads it.
    """

    group: GroupSpec
    page_bytes: int

    def fit(self, large_page_bytes: int) -> GroupSpec:
        """The group with as many whole, aligned pages as a large page holds."""
        count = whole_pages(large_page_bytes, self.page_bytes)
        return replace(
            self.group, page_stride_bytes=large_page_bytes // count, pages_per_large=count
        )


def whole_pages(large_page_bytes: int, page_bytes: int) -> int:
    """Most pages of one aligned stride, at least ``page_bytes``, that fill a large page."""
    counts = _divisors(large_page_bytes // ALIGNMENT_BYTES)
    return counts[bisect_right(counts, large_page_bytes // page_bytes) - 1]


@lru_cache(maxsize=64)
def _divisors(number: int) -> tuple[int, ...]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}))


def align(size_bytes: int) -> int:
    """Up to whole cache lines."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def draft(group: GroupSpec, page_bytes: int = 0) -> Draft:
    """A group with its own page size, or a larger one."""
    return Draft(group, align(page_bytes or group.page_bytes))


def group_by_kind(layers: Sequence[LayerSpec], page_tokens: int) -> list[GroupSpec]:
    """A group for each model, kind, window and size, in order of its first layer.

    A page of a state group holds as many layers as make it no larger than the largest
    page of tokens: one, where a state is large; all, where there are only states.
    """
    groups = [group_of(alike, page_tokens) for alike in classes(layers, _key)]
    largest = max((g.page_bytes for g in groups if g.kind is not GroupKind.STATE), default=0)
    sliced = (_sliced(g, largest) if g.kind is GroupKind.STATE else g for g in groups)
    return with_names(list(sliced))


def without_embeddings(layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """The layers that keys and values, or states, are stored for."""
    return [layer for layer in layers if layer.kind is not GroupKind.VISION]


def with_embeddings_in_kv(drafts: Sequence[Draft], layers: Sequence[LayerSpec]) -> list[Draft]:
    """The same groups; full attention's pages hold the embeddings among ``layers`` too.

    :raises ChangeSomething: if no token of full attention is as large as an embedding.
    """
    hosting = list(drafts)
    for layer in (layer for layer in layers if layer.kind is GroupKind.VISION):
        place = next((i for i, d in enumerate(hosting) if _can_host(d.group, layer)), None)
        if place is None:
            raise ChangeSomething(
                "embeddings",
                "in-kv",
                f"an embedding of {layer.token_bytes} bytes fits in no token of full attention",
                "give embeddings pages of their own",
            )
        group = replace(hosting[place].group, holds_embeddings=True)
        hosting[place] = replace(hosting[place], group=group)
    return hosting


def with_smaller_states(drafts: Sequence[Draft]) -> list[Draft] | None:
    """The same groups with fewer layers in each state's page; None if all have one already."""
    smaller = [_with_smaller_state(one) for one in drafts]
    return None if smaller == list(drafts) else smaller


def _with_smaller_state(one: Draft) -> Draft:
    group = one.group
    if group.kind is not GroupKind.STATE or group.layers_per_page == 1:
        return one
    layers = largest_divisor(len(group.layers), group.layers_per_page - 1)
    return draft(replace(group, layers_per_page=layers))


def padded_to_largest(drafts: Sequence[Draft]) -> list[Draft]:
    """Every page is as large as the largest one."""
    largest = max(one.page_bytes for one in drafts)
    return [replace(one, page_bytes=largest) for one in drafts]


def largest_divisor(count: int, limit: int) -> int:
    """The largest divisor of ``count`` that is no larger than ``limit``; at least 1."""
    return next(d for d in range(min(count, max(1, limit)), 0, -1) if count % d == 0)


def classes(
    layers: Iterable[LayerSpec], key: Callable[[LayerSpec], object]
) -> list[list[LayerSpec]]:
    """Layers that share ``key``; classes, and layers in them, in order of appearance."""
    members: dict[object, list[LayerSpec]] = {}
    for layer in layers:
        members.setdefault(key(layer), []).append(layer)
    return list(members.values())


_Key = tuple[str, bool, bool, GroupKind, int, int]


def _key(layer: LayerSpec) -> _Key:
    owner = (layer.model, layer.is_draft, layer.required_for_hit)
    return (*owner, layer.kind, layer.window_tokens, layer.token_bytes)


def group_of(alike: Sequence[LayerSpec], page_tokens: int) -> GroupSpec:
    """A group, without a name yet, of layers that are all like the first one."""
    first = alike[0]
    return GroupSpec(
        "",
        first.kind,
        tuple(layer.index for layer in alike),
        first.token_bytes,
        1 if first.kind is GroupKind.STATE else page_tokens,
        page_stride_bytes=0,
        pages_per_large=0,
        window_tokens=first.window_tokens,
        model=first.model,
        required_for_hit=first.required_for_hit,
        is_draft=first.is_draft,
    )


def _sliced(group: GroupSpec, largest_page_bytes: int) -> GroupSpec:
    count = len(group.layers)
    limit = largest_page_bytes // group.layer_token_bytes if largest_page_bytes else count
    return replace(group, layers_per_page=largest_divisor(count, limit))


def _can_host(group: GroupSpec, embedding: LayerSpec) -> bool:
    return (
        group.kind is GroupKind.FULL
        and (group.model, group.is_draft) == (embedding.model, embedding.is_draft)
        and group.required_for_hit
        and group.token_bytes >= embedding.token_bytes
    )


def with_names(groups: Sequence[GroupSpec]) -> list[GroupSpec]:
    """Groups named by what they are, and by the size of a token where that is not enough."""
    plain = [plain_name(group) for group in groups]
    sized = [f"{name}/{g.layer_token_bytes}B" for name, g in zip(plain, groups, strict=True)]
    named = zip(groups, plain, sized, strict=True)
    return [replace(g, name=size if plain.count(name) > 1 else name) for g, name, size in named]


def plain_name(group: GroupSpec) -> str:
    """What a group is called: its model, its kind, its window, and whether it is a draft's."""
    window = f"({group.window_tokens})" if group.window_tokens else ""
    prefix = f"{group.model}:" if group.model else ""
    draft = "draft-" if group.is_draft or not group.required_for_hit else ""
    return f"{prefix}{draft}{group.kind}{window}"
