"""Groups of layers: the layers that share a page, and the content of one page of each group.

Groups are *drafts* here: they lack the stride and count that the large page decides.
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
"""The place of waiting embeddings of image tokens: pages of their own, or the pages of the keys and
values that will overwrite them."""


@dataclass(frozen=True)
class Draft:
    """A group before its large page is known.

    :param group: stride and pages per large page are still 0.
    :param page_bytes: size of a page, aligned; more than ``group.page_bytes`` if a manager pads it.
    """

    group: GroupSpec
    page_bytes: int

    def fit(self, large_page_bytes: int) -> GroupSpec:
        """Return the group with as many whole, aligned pages as a large page holds."""
        count = whole_pages(large_page_bytes, self.page_bytes)
        return replace(
            self.group, page_stride_bytes=large_page_bytes // count, pages_per_large=count
        )


def whole_pages(large_page_bytes: int, page_bytes: int) -> int:
    counts = _divisors(large_page_bytes // ALIGNMENT_BYTES)
    return counts[bisect_right(counts, large_page_bytes // page_bytes) - 1]


@lru_cache(maxsize=64)
def _divisors(number: int) -> tuple[int, ...]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}))


def align(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def draft(group: GroupSpec, page_bytes: int = 0) -> Draft:
    """Return a draft of a group with its own page size, or a larger one."""
    return Draft(group, align(page_bytes or group.page_bytes))


def group_by_kind(layers: Sequence[LayerSpec], page_tokens: int) -> list[GroupSpec]:
    """Return a group for each model, kind, window and size, in order of its first layer.

    A page of a state group holds as many layers as make it no larger than the largest page of
    tokens: one, if a state is large; all, if there are only states.
    """
    groups = [group_of(alike, page_tokens) for alike in classes(layers, _key)]
    largest = max((g.page_bytes for g in groups if g.kind is not GroupKind.STATE), default=0)
    sliced = (_sliced(g, largest) if g.kind is GroupKind.STATE else g for g in groups)
    return with_names(list(sliced))


def without_embeddings(layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    return [layer for layer in layers if layer.kind is not GroupKind.VISION]


def with_embeddings_in_kv(drafts: Sequence[Draft], layers: Sequence[LayerSpec]) -> list[Draft]:
    """Return the same groups; full attention's pages hold the embeddings among ``layers`` too.

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
    """Return the groups with fewer layers in each state's page; None if all have one already."""
    smaller = [_with_smaller_state(entry) for entry in drafts]
    return None if smaller == list(drafts) else smaller


def _with_smaller_state(entry: Draft) -> Draft:
    group = entry.group
    if group.kind is not GroupKind.STATE or group.layers_per_page == 1:
        return entry
    layers = largest_divisor(len(group.layers), group.layers_per_page - 1)
    return draft(replace(group, layers_per_page=layers))


def padded_to_largest(drafts: Sequence[Draft]) -> list[Draft]:
    """Pad each page to the size of the largest one."""
    largest = max(entry.page_bytes for entry in drafts)
    return [replace(entry, page_bytes=largest) for entry in drafts]


def largest_divisor(count: int, limit: int) -> int:
    """Return the largest divisor of ``count`` that is no larger than ``limit``; at least 1."""
    return next(d for d in range(min(count, max(1, limit)), 0, -1) if count % d == 0)


def classes(
    layers: Iterable[LayerSpec], key: Callable[[LayerSpec], object]
) -> list[list[LayerSpec]]:
    """Classify layers by ``key``; classes, and layers in them, are in order of appearance."""
    members: dict[object, list[LayerSpec]] = {}
    for layer in layers:
        members.setdefault(key(layer), []).append(layer)
    return list(members.values())


_Key = tuple[str, bool, bool, GroupKind, int, int]


def _key(layer: LayerSpec) -> _Key:
    owner = (layer.model, layer.is_draft, layer.required_for_hit)
    return (*owner, layer.kind, layer.window_tokens, layer.token_bytes)


def group_of(alike: Sequence[LayerSpec], page_tokens: int) -> GroupSpec:
    """Return a group, without a name yet, of layers that are all like the first one."""
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
    """Name groups by their properties, and by the size of a token if these are not unique."""
    plain = [plain_name(group) for group in groups]
    sized = [f"{name}/{g.layer_token_bytes}B" for name, g in zip(plain, groups, strict=True)]
    named = zip(groups, plain, sized, strict=True)
    return [replace(g, name=size if plain.count(name) > 1 else name) for g, name, size in named]


def plain_name(group: GroupSpec) -> str:
    window = f"({group.window_tokens})" if group.window_tokens else ""
    prefix = f"{group.model}:" if group.model else ""
    draft = "draft-" if group.is_draft or not group.required_for_hit else ""
    return f"{prefix}{draft}{group.kind}{window}"
