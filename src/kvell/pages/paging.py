"""Managers with one page size: the pages of engines without layer groups.

``paged`` follows vLLM. It cuts layers into groups of as many layers as there are attention layers,
so that one page holds one group's tokens, and grows ``page_tokens`` to the next multiple of 16 at
which one attention layer's part of a page holds one layer's state. So a state layer takes one such
part for every request: a state page here is as many layers as a token page, each padded to an
attention layer's part. If the attention layers do not divide the state layers, a state page has
their greatest common divisor of layers and divides a token page: each state layer still takes its
part, without the empty layers that vLLM would add to its last group. (Its table for the peer
shapes: jamba-mini 80 tokens × 8 groups, qwen3-next 544 × 4, nemotron-h 1,040 × 7.)

vLLM keeps embeddings of image tokens outside its pages, in a cache of the encoder's outputs. They
have pages of their own here, of the same size, each with as many embeddings as fit.
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
"""Step in which pages that hold a state grow."""


def paged_drafts(layers: Sequence[LayerSpec], page_tokens: int) -> list[Draft]:
    """Return drafts of one page size: a token group for each model, its states and embeddings."""
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
