"""The compiled memory core (csrc/memory); :mod:`kvell.prefix.compiled` is its Python side."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Numbers = tuple[int, ...]

class CompiledCore:
    """Decides as ``ReferenceCore``; groups are (page_tokens, pages_per_large, window or 0)."""

    def __init__(
        self, groups: Sequence[tuple[int, int, int]], num_large_pages: int
    ) -> None: ...
    def begin_step(self, step: int) -> None: ...
    def peek(self, tokens: Ints, root: str) -> int: ...
    def open(self, tokens: Ints, root: str, lease_until: int | None = None) -> int: ...
    def claim(self, handle: int, expected_tokens: int) -> None: ...
    def hit_tokens(self, handle: int) -> int: ...
    def grow(self, handles: Ints, until: Ints) -> tuple[int, Ints]: ...
    def largest(self, handle: int, until: int) -> int: ...
    def held_pages(self, handle: int) -> Ints: ...
    def fits(
        self, handle: int, until: int, chunk_tokens: int, others: Ints, others_until: Ints
    ) -> bool: ...
    def append(self, handles: Ints, tokens: Ints) -> None: ...
    def advance(self, handles: Ints, computed: Ints) -> None: ...
    def close(self, handle: int, *, renew: bool = True) -> None: ...
    def state(
        self,
    ) -> tuple[
        tuple[Numbers, Numbers, Numbers, Numbers, Numbers],
        tuple[
            tuple[dict[int, int], ...],
            tuple[dict[int, tuple[int, int, int]], ...],
            tuple[tuple[int, int, int, int, int], ...],
        ],
        int,
        Numbers,
        tuple[tuple[int, int, int, bool, tuple[tuple[int, Numbers], ...]], ...],
        int,
        Numbers,
        int,
        Numbers,
    ]: ...
