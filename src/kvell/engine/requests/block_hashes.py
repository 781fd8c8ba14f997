"""Hashes of a prompt's blocks, each of all tokens up to its end."""

import hashlib

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.notices import NO_BLOCK

HASH_BYTES = 8
ROOT_DIGEST_BYTES = 8


def root_digest(root: str) -> str:
    """What may be told of a cache root, which holds a secret salt; "" for the plain root."""
    return hashlib.blake2b(root.encode(), digest_size=ROOT_DIGEST_BYTES).hexdigest() if root else ""


class BlockHashes:
    """A chain of hashes over tokens that only grow.

    :param model: equal tokens of several models have different blocks, and so have those of
        several cache roots.
    """

    def __init__(self, block_tokens: int, model: str, root: str) -> None:
        self.block_tokens = block_tokens
        self._of = f"{len(model)}:{model}{root}".encode()
        self._hashes: list[int] = []

    def up_to(self, tokens: npt.NDArray[np.int32]) -> int:
        """The hash of the block that ends with the last token; ``NO_BLOCK`` for no tokens.

        :param tokens: int32, from the beginning; a whole number of blocks.
        """
        count = len(tokens) // self.block_tokens
        while len(self._hashes) < count:
            start = len(self._hashes) * self.block_tokens
            block = tokens[start : start + self.block_tokens].astype("<i4", copy=False)
            self._hashes.append(self._hash(block.tobytes()))
        return self._hashes[count - 1] if count else NO_BLOCK

    def _hash(self, block: bytes) -> int:
        parent = self._hashes[-1] if self._hashes else NO_BLOCK
        content = parent.to_bytes(HASH_BYTES, "little") + block
        key = b"" if self._hashes else hashlib.blake2b(self._of, digest_size=32).digest()
        digest = hashlib.blake2b(content, digest_size=HASH_BYTES, key=key).digest()
        return int.from_bytes(digest, "little") or 1
