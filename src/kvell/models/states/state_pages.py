"""Recurrent states inside pages: a layer's convolution window, then its recurrent state.

    one slice of a state ─┬─ layer ─┬─ window    [channels, kernel − 1]
                          │         └─ recurrent [heads or channels, …]
                          └─ layer …

A head's share is contiguous in both.  Only the requested states are ever copied.
"""

from dataclasses import dataclass

import torch

from kvell.models.config.state_sizes import StateShapes
from kvell.pages.layout import GroupSpec


@dataclass(frozen=True)
class StatePages:
    """Views of the pool, one row per page: the pages of one layer's states.

    :param part: the slice of a state (the one of its pages) that holds the layer.
    :param window: [pages, channels × window].
    :param recurrent: [pages, recurrent size]; None if there is no recurrent state.
    """

    shapes: StateShapes
    part: int
    window: torch.Tensor
    recurrent: torch.Tensor | None

    def load_window(self, pages: torch.Tensor, fresh: torch.Tensor | None) -> torch.Tensor:
        """Load int32 [n] pages as [n, channels, window]; zeros if ``fresh``, bool [n], is set."""
        return _load(self.window, pages, fresh).view(-1, self.shapes.channels, self.shapes.window)

    def store_window(self, pages: torch.Tensor, values: torch.Tensor) -> None:
        _store(self.window, pages, values)

    def load_recurrent(self, pages: torch.Tensor, fresh: torch.Tensor | None) -> torch.Tensor:
        """Load like :meth:`load_window`, as float32 [n, *recurrent]."""
        assert self.recurrent is not None, "the layer has no recurrent state"
        loaded = _load(self.recurrent, pages, fresh).float()
        return loaded.view(-1, *self.shapes.recurrent)

    def store_recurrent(self, pages: torch.Tensor, values: torch.Tensor) -> None:
        assert self.recurrent is not None, "the layer has no recurrent state"
        _store(self.recurrent, pages, values)


def state_pages(
    group: GroupSpec, layer: int, shapes: StateShapes, pool: torch.Tensor, dtype: torch.dtype
) -> StatePages:
    """Return a layer's views of the pool (uint8, flat).

    Window and recurrent state are each float32 or 16 bits, as fits the group's bytes.

    :param dtype: the model's, for numbers of 16 bits; bfloat16 if it is wider.
    :raises ValueError: if the group's pages were sized for other states, or are misaligned.
    """
    layers_per_page = group.layers_per_page or len(group.layers)
    window_dtype, recurrent_dtype = _dtypes(group, shapes, dtype)
    offset_bytes = group.layer_offset_bytes(layer)
    after_bytes = offset_bytes + shapes.window_size * window_dtype.itemsize
    recurrent = None
    if shapes.recurrent_size:
        recurrent = _rows(pool, group, after_bytes, shapes.recurrent_size, recurrent_dtype)
    return StatePages(
        shapes,
        group.layers.index(layer) // layers_per_page,
        _rows(pool, group, offset_bytes, shapes.window_size, window_dtype),
        recurrent,
    )


def _dtypes(
    group: GroupSpec, shapes: StateShapes, dtype: torch.dtype
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of window and recurrent state that together fill the layer's bytes."""
    short = dtype if dtype.itemsize == 2 else torch.bfloat16
    for window, recurrent in (
        (torch.float32, torch.float32),
        (short, short),
        (short, torch.float32),
        (torch.float32, short),
    ):
        size = shapes.window_size * window.itemsize + shapes.recurrent_size * recurrent.itemsize
        if size == group.layer_token_bytes:
            return window, recurrent
    raise ValueError(
        f"group {group.name!r} keeps {group.layer_token_bytes} bytes of state per layer, "
        f"its mixer {shapes.window_size} + {shapes.recurrent_size} numbers"
    )


def _rows(
    pool: torch.Tensor, group: GroupSpec, offset_bytes: int, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """View every page's numbers at an offset as [pages, size] of a dtype."""
    item, stride = dtype.itemsize, group.page_stride_bytes
    if offset_bytes % item or stride % item:
        raise ValueError(f"group {group.name!r}: states are not aligned to {item} bytes")
    whole = pool[: pool.numel() // stride * stride]
    numbers = whole.view(dtype)
    return numbers.as_strided(
        (whole.numel() // stride, size),
        (stride // item, 1),
        numbers.storage_offset() + offset_bytes // item,
    )


def _load(rows: torch.Tensor, pages: torch.Tensor, fresh: torch.Tensor | None) -> torch.Tensor:
    loaded = rows.index_select(0, pages)
    if fresh is not None:  # the page may hold anything, even NaN
        loaded.masked_fill_(fresh[:, None], 0)
    return loaded


def _store(rows: torch.Tensor, pages: torch.Tensor, values: torch.Tensor) -> None:
    if len(pages):
        rows.index_copy_(0, pages.long(), values.reshape(len(pages), -1).to(rows.dtype))
