"""Compiled work of captured attention (csrc/batching/items_module.cpp)."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

def write_items(
    query_starts: Ints,
    context_lens: Ints,
    table_starts: Ints,
    first_positions: Ints,
    tiling: tuple[int, int, int, int, int],
    capacity: tuple[int, int, int],
    into: Ints,
) -> int: ...
