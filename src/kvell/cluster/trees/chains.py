"""A prompt as the hashes of its blocks, made once for many trees."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kvell.engine.protocol.notices import IndexedGroup
from kvell.engine.requests.block_hashes import BlockHashes
from kvell.memory import GroupKind, Tokens

WHOLE = frozenset({GroupKind.FULL, GroupKind.DROPPING})
"""Groups that need every block from the first on; dropping ones share only what drops nothing."""


@dataclass(frozen=True)
class TreeGroup:
    """A layer group, at its place in the instances' layout.

    :param kind: which earlier tokens its layers read.
    :param block_tokens: of a block; of a state group, the distance between reported states.
    :param window_tokens: as in :class:`kvell.memory.LayerSpec`.
    :param short_rope_tokens: of the model (:class:`.IndexedGroup`).
    :param required: whether a hit needs the group; notices do not cover the others.
    """

    kind: GroupKind
    block_tokens: int
    window_tokens: int = 0
    model: str = ""
    required: bool = True
    short_rope_tokens: int = 0

    @classmethod
    def of(cls, indexed: IndexedGroup) -> "TreeGroup":
        """Return a group as an instance names it when it starts."""
        kind = GroupKind(indexed.kind)
        size = indexed.block_tokens
        return cls(
            kind,
            size,
            indexed.window_tokens,
            indexed.model,
            required=size > 0,
            short_rope_tokens=indexed.short_rope_tokens,
        )

    def first_block(self, length: int) -> int:
        """Return the first block that a request needs which resumes after ``length`` tokens.

        See ``active_start`` of the policies in :mod:`kvell.prefix.groups.policies`.
        """
        if self.kind is GroupKind.SLIDING:
            return max(0, length - (self.window_tokens - 1)) // self.block_tokens
        if self.kind is GroupKind.CHUNKED:
            return length // self.window_tokens * self.window_tokens // self.block_tokens
        return 0

    def end_block(self, length: int) -> int:
        return -(-length // self.block_tokens)


SEGMENT_BLOCKS = 64
"""Blocks of a segment: one digest of them takes an eighth of the time of all their hashes."""
MOST_SEGMENTS = 65_536
"""Most segments: some 50 MB; with blocks of 16 tokens they cover 67 million tokens."""


class HashMemo:
    """A cache of the block hashes of text segments, which keeps those that were used last.

    Hashing is a large part of routing a request, and most of a prompt was hashed before.  A
    segment is found by a digest of all tokens up to its end.
    """

    def __init__(self, most_segments: int = MOST_SEGMENTS) -> None:
        self._most_segments = most_segments
        self._segments: OrderedDict[bytes, bytes] = OrderedDict()
        """Digest → hashes, as little-endian uint64."""

    def __len__(self) -> int:
        return len(self._segments)

    def hashes(self, tokens: Tokens, block_tokens: int, model: str, root: str) -> list[int]:
        """Return the hashes of all whole blocks, in order.

        :param tokens: int32, a whole text.
        """
        raw = tokens.astype("<i4", copy=False).tobytes()
        size = SEGMENT_BLOCKS * block_tokens * 4
        digest = _digest(f"{block_tokens}:{len(model)}:{model}{root}".encode())
        digests: list[bytes] = []
        segments: list[bytes] = []
        for start in range(0, len(raw) - size + 1, size):
            digest = _digest(digest + raw[start : start + size])
            digests.append(digest)
            if len(segments) == len(digests) - 1 and (cached := self._segments.get(digest)):
                self._segments.move_to_end(digest)
                segments.append(cached)
        begun = np.frombuffer(b"".join(segments), "<u8").tolist()
        hashes = BlockHashes(block_tokens, model, root, begun).all_of(tokens)
        for at in range(len(segments), len(digests)):
            segment = hashes[at * SEGMENT_BLOCKS : (at + 1) * SEGMENT_BLOCKS]
            self._segments[digests[at]] = np.asarray(segment, "<u8").tobytes()
        while len(self._segments) > self._most_segments:
            self._segments.popitem(last=False)
        return hashes


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


@dataclass(frozen=True)
class PromptChain:
    """A prompt's block hashes for each block size that its model needs.

    :param hashes: block size → the hashes of all whole blocks, in order.
    :param alignment_tokens: lengths of this multiple are whole blocks, and states, in every group.
    """

    tokens: int
    model: str
    hashes: Mapping[int, Sequence[int]]
    alignment_tokens: int

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        groups: Sequence[TreeGroup],
        model: str = "",
        root: str = "",
        memo: HashMemo | None = None,
    ) -> "PromptChain":
        """Hash a prompt.

        :param tokens: int32; images have the ids that instances get.
        :param root: the cache root, as instances make it of salt, adapter and the like.
        :param memo: kept by a caller that hashes many prompts.
        """
        made = HashMemo() if memo is None else memo  # an empty one is false
        sizes = {group.block_tokens for group in groups if group.required and group.model == model}
        hashes = {size: made.hashes(tokens, size, model, root) for size in sorted(sizes)}
        return cls(len(tokens), model, MappingProxyType(hashes), math.lcm(*sizes))

    @property
    def limit_tokens(self) -> int:
        return max(0, self.tokens - 1)
