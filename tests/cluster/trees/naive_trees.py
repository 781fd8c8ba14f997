"""What a prompt tree must answer, counted token by token and block by block."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvell.cluster.trees.chains import PromptChain, TreeGroup
from kvell.engine.protocol.notices import (
    NO_BLOCK,
    BlocksHeld,
    BlocksRemoved,
    BlocksStored,
    IndexNotice,
)
from kvell.memory import GroupKind

Block = tuple[int, int]
"""(group, hash)."""

FULL, SLIDING = TreeGroup(GroupKind.FULL, 4), TreeGroup(GroupKind.SLIDING, 4, 10)
GROUPS: tuple[tuple[TreeGroup, ...], ...] = (
    (FULL,),
    (FULL, SLIDING),
    (TreeGroup(GroupKind.SLIDING, 2, 5), TreeGroup(GroupKind.FULL, 4)),
    (TreeGroup(GroupKind.STATE, 4), FULL),
    (FULL, TreeGroup(GroupKind.CHUNKED, 2, 8)),
    (SLIDING,),
    (TreeGroup(GroupKind.STATE, 3), TreeGroup(GroupKind.STATE, 3)),
    (TreeGroup(GroupKind.STATE, 2), TreeGroup(GroupKind.SLIDING, 2, 7), FULL),
    (TreeGroup(GroupKind.DROPPING, 4, 100), TreeGroup(GroupKind.VISION, 0, required=False)),
    (FULL, TreeGroup(GroupKind.FULL, 2, model="other")),
)


def chain_of(tokens: Sequence[int], groups: Sequence[TreeGroup], root: str = "") -> PromptChain:
    return PromptChain.of(np.asarray(tokens, np.int32), groups, "", root)


def blocks_of(chain: PromptChain, groups: Sequence[TreeGroup]) -> list[Block]:
    return [
        (index, one)
        for index, group in enumerate(groups)
        if group.required and group.model == chain.model
        for one in chain.hashes[group.block_tokens]
    ]


def naive_match(
    chain: PromptChain, groups: Sequence[TreeGroup], held: Mapping[str, set[Block]]
) -> dict[str, int]:
    own = [
        (index, one)
        for index, one in enumerate(groups)
        if one.required and one.model == chain.model
    ]
    step = math.lcm(*(group.block_tokens for _, group in own))
    lengths = [
        length
        for length in range(1, chain.tokens)
        if length % step == 0 or length == chain.tokens - 1
    ]
    found = {
        name: max(
            (
                length
                for length in lengths
                if all(_resumes(index, one, chain, blocks, length) for index, one in own)
            ),
            default=0,
        )
        for name, blocks in held.items()
    }
    return {name: length for name, length in found.items() if length}


def _resumes(
    index: int, group: TreeGroup, chain: PromptChain, held: set[Block], length: int
) -> bool:
    hashes, size = chain.hashes[group.block_tokens], group.block_tokens
    if group.kind is GroupKind.STATE:
        ends = {(at + 1) * size: one for at, one in enumerate(hashes)}
        return length in ends and (index, ends[length]) in held
    first = 0
    if group.kind is GroupKind.SLIDING:
        first = max(0, length + 1 - group.window_tokens)  # the next token counts too
    elif group.kind is GroupKind.CHUNKED:
        first = length - length % group.window_tokens
    places = {token // size for token in range(first, length)}
    return all(at < len(hashes) and (index, hashes[at]) in held for at in places)


def stored(sequence: int, blocks: Iterable[Block]) -> IndexNotice:
    """A notice of blocks that are cached now; each is its own change, which is allowed."""
    changes = tuple(BlocksStored(group, "any", NO_BLOCK, (one,), b"", 4) for group, one in blocks)
    return IndexNotice(sequence, changes)


def removed(sequence: int, blocks: Iterable[Block]) -> IndexNotice:
    return IndexNotice(sequence, tuple(BlocksRemoved(group, (one,)) for group, one in blocks))


def whole(sequence: int, blocks: Iterable[Block]) -> IndexNotice:
    by_group: dict[int, list[int]] = {}
    for group, one in sorted(blocks):
        by_group.setdefault(group, []).append(one)
    changes = tuple(BlocksHeld(group, tuple(hashes)) for group, hashes in by_group.items())
    return IndexNotice(sequence, changes, is_whole=True)
