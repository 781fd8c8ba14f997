"""Hashes of a prompt's blocks, each over all tokens up to the block's end."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.notices import NO_BLOCK

HASH_BYTES = 8
ROOT_DIGEST_BYTES = 8
_NO_HASH = bytes(HASH_BYTES)


def root_digest(root: str) -> str:
    """Return a public digest of a cache root, which holds a secret salt; "" for the plain root."""
    return hashlib.blake2b(root.encode(), digest_size=ROOT_DIGEST_BYTES).hexdigest() if root else ""


class BlockHashes:
    """A chain of hashes over tokens that only grow.

    :param model: different models, and different roots, give equal tokens different hashes.
    :param begun: hashes of the first blocks.
    """

    def __init__(self, block_tokens: int, model: str, root: str, begun: Sequence[int] = ()) -> None:
        self.block_tokens = block_tokens
        self._of = f"{len(model)}:{model}{root}".encode()
        self._hashes: list[int] = list(begun)

    def up_to(self, tokens: npt.NDArray[np.int32]) -> int:
        """Return the hash of the block that ends with the last token; ``NO_BLOCK`` for none."""
        count = len(tokens) // self.block_tokens
        if len(self._hashes) < count:
            self._grow(tokens, count)
        return self._hashes[count - 1] if count else NO_BLOCK

    def all_of(self, tokens: npt.NDArray[np.int32]) -> list[int]:
        """Return the hashes of all whole blocks, in order.

        :param tokens: int32, from the beginning; a block that is not full has no hash.
        """
        count = len(tokens) // self.block_tokens
        if len(self._hashes) < count:
            self._grow(tokens, count)
        return self._hashes[:count]

    def _grow(self, tokens: npt.NDArray[np.int32], count: int) -> None:
        """Hash the blocks after those that are hashed already.

        Copying a fresh hash object costs half of making one, and a prompt has hundreds of blocks.
        """
        done = len(self._hashes)
        size = self.block_tokens
        new = tokens[done * size : count * size].astype("<i4", copy=False).tobytes()
        digest = self._hashes[-1].to_bytes(HASH_BYTES, "little") if done else _NO_HASH
        fresh = hashlib.blake2b(digest_size=HASH_BYTES)
        digests = []
        for start in range(0, len(new), size * 4):
            if start or done:
                of_block = fresh.copy()
            else:
                key = hashlib.blake2b(self._of, digest_size=32).digest()
                of_block = hashlib.blake2b(digest_size=HASH_BYTES, key=key)
            of_block.update(digest + new[start : start + size * 4])
            digest = of_block.digest()
            if digest == _NO_HASH:  # this value names no block
                digest = (1).to_bytes(HASH_BYTES, "little")
            digests.append(digest)
        self._hashes += np.frombuffer(b"".join(digests), "<u8").tolist()
