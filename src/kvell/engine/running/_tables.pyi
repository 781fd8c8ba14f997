"""Compiled page tables and step metadata (csrc/batching); arrays are returned with addresses."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

def token_rows(
    starts: Sequence[int], counts: Sequence[int], logits: Sequence[int], token_ids: Sequence[Ints]
) -> tuple[Longs, int]: ...

class PageTables:
    def __init__(self, groups: Sequence[tuple[int, int, int, int]]) -> None: ...
    def update(self, released: Sequence[int], new_pages: Ints) -> None: ...
    def pages(self, handle: int, group: int) -> Ints: ...
    def arrays(
        self,
        group: int,
        handles: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        away: Sequence[int],
    ) -> tuple[Ints, int]: ...
    def states(
        self,
        group: int,
        handles: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        slices: int,
    ) -> tuple[Ints, int]: ...
