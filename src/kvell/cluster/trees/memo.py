"""Hashes of the common parts of prompts: system prompts, documents, earlier turns."""

import hashlib
from collections import OrderedDict

import numpy as np

from kvell.engine.requests.block_hashes import BlockHashes
from kvell.memory import Tokens

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
