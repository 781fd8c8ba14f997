"""The work of a step of short requests, written into memory that captured launches read."""

import numpy as np

from kvell.attention.triton.held import Capacity
from kvell.attention.triton.work import HEADER_INTS, Ints, Lengths, Tiling, cut_short

try:
    from kvell.attention.triton import _items
except ImportError:  # a source tree that was not built
    IS_COMPILED = False
else:
    IS_COMPILED = True


def fill_items(lengths: Lengths, tiling: Tiling, capacity: Capacity, into: Ints) -> int:
    """Write the number of items and the items of a batch; return the number.

    A request whose context is 0 gets an item that reads nothing, so its rows become 0.

    :param into: int32 [``capacity.num_ints``]; what follows the items is left as it is.
    :raises ValueError: if a request is not short, or the capacity is too small.
    """
    if not IS_COMPILED:
        return fill_in_numpy(lengths, tiling, capacity, into)
    rule = (
        tiling.short_tokens,
        tiling.section_tokens,
        tiling.page_tokens,
        tiling.window_tokens,
        tiling.chunk_tokens,
    )
    limits = (capacity.items, capacity.tiles, capacity.tile_tokens)
    return _items.write_items(*lengths, rule, limits, into)


def fill_in_numpy(lengths: Lengths, tiling: Tiling, capacity: Capacity, into: Ints) -> int:
    tiles, items = cut_short(lengths, tiling)
    tile_tokens = int(tiles[:, 5].max()) if len(tiles) else 0
    if len(tiles) > capacity.tiles or tile_tokens > capacity.tile_tokens:
        raise ValueError(f"capacity: too few tiles, or tokens of a tile, in {capacity}")
    if len(items) > capacity.items or len(into) < capacity.num_ints:
        raise ValueError(f"capacity: too few items in {capacity}")
    into[0] = len(items)
    into[HEADER_INTS : HEADER_INTS + items.size] = np.ravel(items)
    return len(items)
