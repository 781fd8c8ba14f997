"""Digests of prefixes: equal digests mean equal tokens (except for 1 in 2¹²⁸ pairs)."""

import hashlib

import numpy as np
import numpy.typing as npt

Digest = bytes
SIZE_BYTES = 16
EVERY_TOKENS = 64
"""The stride of saved hash states; a prefix is hashed from the last state before its end."""


def full_root(root: str, model: str) -> str:
    return f"{len(model)}:{model}{root}"


class PrefixDigests:
    """The digests of one text's prefixes, by length.

    :param tokens: int32 [n]; must not change.
    :param root: the text's cache root; texts of different roots have no digest in common.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], root: str) -> None:
        self._tokens = tokens
        begun = hashlib.blake2b(digest_size=SIZE_BYTES)
        begun.update(f"{len(root)}:{root}".encode())
        self._begun = [begun]
        self._known: dict[int, Digest] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def of(self, length: int) -> Digest:
        """Return the digest of the first ``length`` tokens.

        :raises ValueError: if the text is shorter.
        """
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"a text of {len(self._tokens)} tokens has no prefix of {length}")
        if length not in self._known:
            self._known[length] = self._digest(length)
        return self._known[length]

    def _digest(self, length: int) -> Digest:
        place = length // EVERY_TOKENS
        while len(self._begun) <= place:
            start = (len(self._begun) - 1) * EVERY_TOKENS
            self._begun.append(self._after(self._begun[-1], start, start + EVERY_TOKENS))
        return self._after(self._begun[place], place * EVERY_TOKENS, length).digest()

    def _after(self, begun: "hashlib.blake2b", start: int, end: int) -> "hashlib.blake2b":
        further = begun.copy()
        further.update(self._tokens[start:end].astype("<i4", copy=False).tobytes())
        return further
