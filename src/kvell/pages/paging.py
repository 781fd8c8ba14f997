"""The managers that know one page size: what paged engines without layer groups would hold.

``paged`` follows vLLM.  It cuts layers into groups of as many layers as there are attention
layers, so that one page holds one group's tokens, and grows ``page_tokens`` to the next
multiple of 16 at which one attention layer's part of a page holds one layer's state.  So a
state layer takes one such part for every request: a state page here is as many layers as a
token page, each padded to an attention layer's part.  Where the attention layers do not
divide the state layers, a state page has their greatest common divisor of layers and divides
a token page: each state layer still takes its part, without the empty layers that vLLM would
add to its last group.
(Its table for the peer shapes: jamba-mini 80 tokens × 8 groups, qwen3-next 544 × 4,
nemotron-h 1,040 × 7.)

Embeddings of image tokens lie outside vLLM's pages, in a cache of the encoder's outputs: they
keep pages of their own here, of the same size, with as many embeddings as go in.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from kvell.pages.grouping import (
    Draft,
    align,
    classes,
    draft,
    group_of,
    padded_to_largest,
    plain_name,
)
from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec

UNIT_TOKENS = 16
"""Pages that hold a state grow in steps of this many tokens."""


def paged_drafts(layers: Sequence[LayerSpec], page_tokens: int) -> list[Draft]:
    """One page size for all; a token group for each model, states and embeddings beside it."""
    by_model = classes(layers, lambda layer: (layer.model, layer.is_draft))
    drafts = [one for part in by_model for one in _one_size(part, page_tokens)]
    return padded_to_largest(drafts) if len(by_model) > 1 else drafts


def split_drafts(layers: Sequence[LayerSpec], page_tokens: int) -> list[Draft]:
    """A page size of its own for every model and for its drafter."""
    parts = classes(layers, _owner)
    return [one for part in parts for one in _one_size(part, page_tokens)]


def bytes_per_token(drafts: Sequence[Draft]) -> list[int]:
    """Weight of each draft in a split of memory by bytes per token, padding included.

    A state counts as if there were one for each page of tokens of its model: as many
    as the shortest requests have, so that tokens are what a long request runs out of.
    """
    return [
        -(-one.page_bytes * one.group.slices // _tokens_of_page(one.group, drafts))
        if one.group.kind is GroupKind.STATE
        else -(-one.page_bytes // one.group.page_tokens)
        for one in drafts
    ]


def _tokens_of_page(state: GroupSpec, drafts: Sequence[Draft]) -> int:
    return max(d.group.page_tokens for d in drafts if _owner(d.group) == _owner(state))


def _owner(of: LayerSpec | GroupSpec) -> tuple[str, bool, bool]:
    """What has memory of its own when memory is cut: a model, or its drafter."""
    return (of.model, of.is_draft, of.required_for_hit)


def _one_size(layers: Sequence[LayerSpec], page_tokens: int) -> list[Draft]:
    tokens = [x for x in layers if x.kind not in (GroupKind.STATE, GroupKind.VISION)]
    states = classes((x for x in layers if x.kind is GroupKind.STATE), _size)
    embeddings = classes((x for x in layers if x.kind is GroupKind.VISION), _size)
    if not tokens:
        return [draft(_named(group_of(alike, page_tokens))) for alike in (*states, *embeddings)]
    largest_state = max((alike[0].state_bytes for alike in states), default=0)
    attention = _token_group(tokens, _grown(page_tokens, max(map(_size, tokens)), largest_state))
    part_bytes = align(attention.layer_page_bytes)
    page_bytes = align(attention.page_bytes)
    return [
        draft(attention),
        *(_state_draft(alike, len(tokens), part_bytes, len(states) > 1) for alike in states),
        *(_embedding_draft(alike, page_bytes) for alike in embeddings),
    ]


def _grown(page_tokens: int, token_bytes: int, state_bytes: int) -> int:
    steps = -(-state_bytes // (UNIT_TOKENS * token_bytes))
    return max(page_tokens, UNIT_TOKENS * steps)


def _token_group(layers: Sequence[LayerSpec], page_tokens: int) -> GroupSpec:
    """All attention layers; tokens as large as the largest, all of them kept."""
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
