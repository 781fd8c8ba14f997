"""From layers to a layout: the large page that the pages of all groups divide.

Source: Jenga §4.4 (why the least common multiple); ADR 1.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

from kvell.byte_sizes import typed_bytes
from kvell.errors import ChangeSomething
from kvell.pages.grouping import (
    ALIGNMENT_BYTES,
    Draft,
    Embeddings,
    align,
    classes,
    draft,
    group_by_kind,
    group_of,
    padded_to_largest,
    plain_name,
    whole_pages,
    with_embeddings_in_kv,
    with_smaller_states,
    without_embeddings,
)
from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec, Layout
from kvell.vocabulary import KIB, MIB


def larges_for(pages: int, pages_per_large: Sequence[int]) -> list[int]:
    """Return the large pages that ``pages`` pages take in each group."""
    return [-(-pages // count) for count in pages_per_large]


def equal_shares(pages_per_large: Sequence[int], num_large_pages: int) -> tuple[int, ...]:
    """Return large pages of each group if all get the same number of pages, as many as fit.

    All zero if the pool has fewer large pages than groups.
    """
    low = 0
    high = num_large_pages * max(pages_per_large)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(larges_for(middle, pages_per_large)) <= num_large_pages:
            low = middle
        else:
            high = middle - 1
    return tuple(larges_for(low, pages_per_large))


def proportional_shares(weights: Sequence[int], num_large_pages: int) -> tuple[int, ...]:
    """Return large pages of each group in proportion to its weight, at least one each.

    All are given out; the groups that lost most by rounding get the remainder. All zero if the pool
    has fewer large pages than groups.
    """
    spare = num_large_pages - len(weights)
    if spare < 0:
        return (0,) * len(weights)
    total = sum(weights)
    shares = [1 + spare * weight // total for weight in weights]
    lost = sorted(range(len(weights)), key=lambda i: -(spare * weights[i] % total))
    for i in lost[: num_large_pages - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


UNIT_TOKENS = 16
"""Step in which pages that hold a state grow."""


def paged_drafts(layers: Sequence[LayerSpec], page_tokens: int) -> list[Draft]:
    """Return drafts of one page size: a token group for each model, its states and embeddings.

    ``paged`` follows vLLM.  It cuts layers into groups of as many layers as there are attention
    layers, so that one page holds one group's tokens, and grows ``page_tokens`` to the next
    multiple of 16 at which one attention layer's part of a page holds one layer's state.  So a
    state layer takes one such part for every request: a state page here is as many layers as a
    token page, each padded to an attention layer's part.  If the attention layers do not divide the
    state layers, a state page has their greatest common divisor of layers and divides a token page:
    each state layer still takes its part, without the empty layers that vLLM would add to its last
    group.  (Its table for the peer shapes: jamba-mini 80 tokens × 8 groups, qwen3-next 544 × 4,
    nemotron-h 1,040 × 7.)

    vLLM keeps embeddings of image tokens outside its pages, in a cache of the encoder's outputs.
    They have pages of their own here, of the same size, each with as many embeddings as fit.
    """
    by_model = classes(layers, lambda layer: (layer.model, layer.is_draft))
    drafts = [entry for part in by_model for entry in _one_size(part, page_tokens)]
    return padded_to_largest(drafts) if len(by_model) > 1 else drafts


def split_drafts(layers: Sequence[LayerSpec], page_tokens: int) -> list[Draft]:
    """Return drafts with one page size per model and per drafter."""
    parts = classes(layers, _owner)
    return [entry for part in parts for entry in _one_size(part, page_tokens)]


def bytes_per_token(drafts: Sequence[Draft]) -> list[int]:
    """Return the weight of each draft in a split of memory by bytes per token, padding included.

    A state counts as if there were one for each page of tokens of its model: as many as the
    shortest requests have, so that a long request exhausts tokens before states.
    """
    return [
        -(-entry.page_bytes * entry.group.slices // _tokens_of_page(entry.group, drafts))
        if entry.group.kind is GroupKind.STATE
        else -(-entry.page_bytes // entry.group.page_tokens)
        for entry in drafts
    ]


def _tokens_of_page(state: GroupSpec, drafts: Sequence[Draft]) -> int:
    return max(d.group.page_tokens for d in drafts if _owner(d.group) == _owner(state))


def _owner(of: LayerSpec | GroupSpec) -> tuple[str, bool, bool]:
    return (of.model, of.is_draft, of.required_for_hit)


def _one_size(layers: Sequence[LayerSpec], page_tokens: int) -> list[Draft]:
    tokens = [x for x in layers if x.kind not in (GroupKind.STATE, GroupKind.VISION)]
    states = classes((x for x in layers if x.kind is GroupKind.STATE), _size)
    embeddings = classes((x for x in layers if x.kind is GroupKind.VISION), _size)
    if not tokens:
        return [draft(_named(group_of(alike, page_tokens))) for alike in (*states, *embeddings)]
    largest_state = max((alike[0].state_bytes for alike in states), default=0)
    steps = -(-largest_state // (UNIT_TOKENS * max(map(_size, tokens))))
    attention = _token_group(tokens, max(page_tokens, UNIT_TOKENS * steps))
    part_bytes = align(attention.layer_page_bytes)
    page_bytes = align(attention.page_bytes)
    return [
        draft(attention),
        *(_state_draft(alike, len(tokens), part_bytes, len(states) > 1) for alike in states),
        *(_embedding_draft(alike, page_bytes) for alike in embeddings),
    ]


def _token_group(layers: Sequence[LayerSpec], page_tokens: int) -> GroupSpec:
    """Return one group of all attention layers, which keeps all tokens at the largest size."""
    group = GroupSpec(
        "",
        GroupKind.FULL,
        tuple(layer.index for layer in layers),
        max(map(_size, layers)),
        page_tokens,
        page_stride_bytes=0,
        pages_per_large=0,
        model=layers[0].model,
        required_for_hit=any(layer.required_for_hit for layer in layers),
        is_draft=layers[0].is_draft,
        counts_images=any(layer.kind is GroupKind.CROSS for layer in layers),
    )
    return replace(group, name=plain_name(group).replace(GroupKind.FULL, "all"))


def _state_draft(
    alike: Sequence[LayerSpec], attention_layers: int, part_bytes: int, sized: bool
) -> Draft:
    group = _named(group_of(alike, 1), sized)
    layers = math.gcd(len(alike), attention_layers)
    return draft(replace(group, layers_per_page=layers), layers * part_bytes)


def _embedding_draft(alike: Sequence[LayerSpec], page_bytes: int) -> Draft:
    group = _named(group_of(alike, 1))
    tokens = max(1, page_bytes // group.token_bytes)
    group = replace(group, page_tokens=tokens)
    return draft(group, max(page_bytes, group.page_bytes))


def _named(group: GroupSpec, sized: bool = False) -> GroupSpec:
    suffix = f"/{group.layer_token_bytes}B" if sized else ""
    return replace(group, name=plain_name(group) + suffix)


def _size(layer: LayerSpec) -> int:
    return layer.token_bytes


Manager = Literal["kvell", "jenga", "paged", "max-page", "static", "manual"]
"""Configurations of the one allocator.

``kvell``: a group per kind, window and size, associated by demand.  ``jenga``: the
same groups, allocated in the literal order of Jenga §5.4.  ``paged``: one page size,
every attention layer holds every token, every state is padded.
``max-page``: every group's page is padded to the largest.  ``static``: memory is cut at
start, the same number of pages for each group.  ``manual``: memory is cut at start between
target and drafter, or between models, by their bytes per token; each part is ``paged``.
"""
MANAGERS: tuple[Manager, ...] = get_args(Manager)
"""All managers."""
GROUPED: frozenset[Manager] = frozenset({"kvell", "jenga", "static"})
"""Managers whose pages are as small as their groups allow."""
CUT_AT_START: frozenset[Manager] = frozenset({"static", "manual"})

DEFAULT_PAGE_TOKENS = 16
MAX_PADDING = 0.01
"""Padding that may buy a smaller large page, as a fraction of a page."""
ROUND_COUNTS = (1, 2, 4, 6, 12, 24, 60, 120, 240, 720, 840, 2520, 5040)
"""Counts with many divisors: a multiple of cache lines by such a count is cut in many ways."""
TAME_FACTOR = 8
"""A least common multiple up to this many of the largest pages is used unchanged."""


def plan_layout(
    layers: Sequence[LayerSpec],
    kv_memory_bytes: int,
    *,
    manager: Manager = "kvell",
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    embeddings: Embeddings = "own",
    large_page_bytes: int | None = None,
) -> Layout:
    """Cut ``kv_memory_bytes`` into large pages that every group of ``layers`` divides.

    :param kv_memory_bytes: size of the pool; a rest smaller than a large page is unused.
    :param manager: see :data:`Manager`.
    :param page_tokens: tokens of a page.
    :param embeddings: ``in-kv`` keeps embeddings of image tokens in the pages of full attention
        until keys and values overwrite them.
    :param large_page_bytes: a size known to serve more groups than these (those of models that are
        registered later); None to choose one.
    :raises ChangeSomething: if there is not even one page for each group that must have its own, if
        there are no layers, or if embeddings fit in no page.
    """
    if manager not in MANAGERS:
        raise ChangeSomething(
            "--manager", manager, "is not a manager", f"use one of {', '.join(MANAGERS)}"
        )
    storing = [layer for layer in layers if layer.kv_of is None]
    if not storing:
        raise ChangeSomething("model", "no layers", "stores no KV cache", "use a decoder model")
    drafts = _drafts(storing, manager, page_tokens, embeddings)
    if manager in GROUPED and large_page_bytes is None:
        drafts = _with_little_padding(drafts, kv_memory_bytes)
    large_page_bytes, rule = _large_page(drafts, kv_memory_bytes, large_page_bytes)
    num_large_pages = kv_memory_bytes // large_page_bytes
    cut = manager in CUT_AT_START
    _require_pages(kv_memory_bytes, large_page_bytes, len(drafts) if cut else 1)
    return Layout(
        tuple(entry.fit(large_page_bytes) for entry in drafts),
        large_page_bytes,
        num_large_pages,
        "max-page" if manager == "max-page" else rule,
        "literal" if manager == "jenga" else "demand",
        _quota(drafts, large_page_bytes, num_large_pages, manager),
    )


def by_kind(layers: Sequence[LayerSpec], page_tokens: int) -> list[Draft]:
    return [draft(group) for group in group_by_kind(layers, page_tokens)]


_DRAFTS: dict[Manager, Callable[[Sequence[LayerSpec], int], list[Draft]]] = {
    "kvell": by_kind,
    "jenga": by_kind,
    "paged": paged_drafts,
    "max-page": lambda layers, page_tokens: padded_to_largest(by_kind(layers, page_tokens)),
    "static": by_kind,
    "manual": split_drafts,
}


def _drafts(
    layers: Sequence[LayerSpec], manager: Manager, page_tokens: int, embeddings: Embeddings
) -> list[Draft]:
    if embeddings == "own":
        return _DRAFTS[manager](layers, page_tokens)
    drafts = _DRAFTS[manager](without_embeddings(layers), page_tokens)
    return with_embeddings_in_kv(drafts, layers)


def _with_little_padding(drafts: list[Draft], pool_bytes: int) -> list[Draft]:
    """Put states in smaller pages if no large page of fair size fits all pages otherwise."""
    attempt: list[Draft] | None = drafts
    while attempt is not None:
        rule = choose_large_page_bytes([entry.page_bytes for entry in attempt], pool_bytes)[1]
        if rule != "largest-page":
            return attempt
        attempt = with_smaller_states(attempt)
    return drafts


def _quota(
    drafts: Sequence[Draft], large_page_bytes: int, num_large_pages: int, manager: Manager
) -> tuple[int, ...] | None:
    if manager == "static":
        counts = [entry.fit(large_page_bytes).pages_per_large for entry in drafts]
        return equal_shares(counts, num_large_pages)
    if manager == "manual":
        return proportional_shares(bytes_per_token(drafts), num_large_pages)
    return None


def _require_pages(kv_memory_bytes: int, large_page_bytes: int, count: int) -> None:
    if kv_memory_bytes >= count * large_page_bytes:
        return
    raise ChangeSomething(
        "--kv-memory",
        typed_bytes(kv_memory_bytes),
        "is smaller than one page of this model" + (" for each layer group" * (count > 1)),
        f"use at least {-(-count * large_page_bytes // KIB)}KiB",
    )


def _large_page(
    drafts: Sequence[Draft], pool_bytes: int, large_page_bytes: int | None
) -> tuple[int, str]:
    page_bytes = [entry.page_bytes for entry in drafts]
    if large_page_bytes is None:
        return choose_large_page_bytes(page_bytes, pool_bytes)
    least = max(page_bytes)
    if large_page_bytes < least or large_page_bytes % ALIGNMENT_BYTES:
        raise ChangeSomething(
            "large_page_bytes",
            large_page_bytes,
            f"is not a multiple of {ALIGNMENT_BYTES} that holds a page of every group",
            f"use at least {least}",
        )
    return large_page_bytes, "given"


def choose_large_page_bytes(page_bytes: Sequence[int], pool_bytes: int) -> tuple[int, str]:
    """Return the size of the large page for small pages of ``page_bytes``, and its rule.

    Rules, in order: ``lcm`` when the least common multiple is small; ``padded``, the smallest size
    that wastes at most 1 % of any page (the multiple itself wastes none); ``largest-page`` when
    nothing else stays below 1/64 of the pool.
    """
    cap = min(pool_bytes // 64, max(64 * MIB, pool_bytes // 256))
    largest = max(page_bytes)
    lcm = math.lcm(*page_bytes)
    if lcm <= min(cap, TAME_FACTOR * largest) or lcm == largest:
        return lcm, "lcm"
    for size in padded_sizes(page_bytes, cap):
        return size, "padded"
    return _largest_page(page_bytes), "largest-page"


def padded_sizes(page_bytes: Sequence[int], cap: int) -> Iterator[int]:
    """Yield sizes, ascending, that every page fits with little padding.

    Each is about a multiple of some page; a page below ``MAX_PADDING`` of the largest fits any
    size, so no multiples of it are tried.
    """
    largest = max(page_bytes)
    steps = {p for p in page_bytes if p >= MAX_PADDING * largest}
    for near in heapq.merge(*(range(-(-largest // p) * p, cap + 1, p) for p in steps)):
        if any(near % p > MAX_PADDING * near for p in page_bytes):
            continue
        counts = [near // p for p in page_bytes]
        unit = ALIGNMENT_BYTES * math.lcm(*counts)
        size = -(-near // unit) * unit
        padding = max(size / (c * p) - 1 for c, p in zip(counts, page_bytes, strict=True))
        if size <= cap and padding <= MAX_PADDING:
            yield size


def _largest_page(page_bytes: Sequence[int]) -> int:
    largest = max(page_bytes)
    units = [math.lcm(*(largest // p for p in page_bytes)), *ROUND_COUNTS]
    sizes = {
        -(-largest // (unit * ALIGNMENT_BYTES)) * unit * ALIGNMENT_BYTES
        for unit in units
        if unit * ALIGNMENT_BYTES <= largest or unit == 1
    }
    return min(
        sizes, key=lambda size: (max(size / (whole_pages(size, p) * p) for p in page_bytes), size)
    )
