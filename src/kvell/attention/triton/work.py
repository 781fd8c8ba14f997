"""Cutting of a step's attention into programs: on the host, once per batch and shape.

A request with up to ``SHORT_TOKENS`` new tokens is *short*: its tiles are cut into sections
of the context.  Any other is *long*: a tile is one program.  The kind depends on nothing but
the request's new tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvell.attention.interface import AttendParams, GroupBatch, HostLengths

SHORT_TOKENS = 16
"""The most new tokens of a short request: a decode, or the verification of drafts."""

UNLIMITED = 1 << 30
"""The size that stands for no window or no chunk."""

TILE = ("table", "begin", "end", "first_own", "first_row", "rows", "", "")
"""The fields of a tile: the index of page position 0 among the page ids; the positions
[begin, end) that are stored; position and query row of the first token; number of tokens.
Padded to 32 bytes."""

ITEM = (*TILE[:6], "section_begin", "section_end", "first_item", "sections", "tile", "")
"""The fields of a section of a short tile: the tile; the section's positions; the tile's first
item and number of sections; the tile's number.  Padded to 48 bytes."""

MOST_SECTIONS = 8
"""The number of sections from which a tile's sections double in size: a program waits for its
stores at the end of each section, so fewer sections wait less."""

MOST_DOUBLINGS = 2
"""The limit of doublings: a single request still has programs for a whole GPU."""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles and sections, by a layer's heads, page size, window and chunk."""

    short_tokens: int
    long_tokens: int
    section_tokens: int
    page_tokens: int
    window_tokens: int
    chunk_tokens: int


@dataclass(frozen=True)
class Work:
    """A batch's programs; int32 tables on the pool's device, sizes on the host.

    :param items: [i, 12], rows of ``ITEM``; the items of a tile are adjacent.
    :param short_tiles: number of tiles in ``items``.
    :param short_tokens: most tokens of a short tile.
    :param tiles: [t, 8], rows of ``TILE`` of long tiles; the tiles that read most come first.
    """

    items: torch.Tensor
    short_tiles: int
    short_tokens: int
    tiles: torch.Tensor


class WorkCutter:
    """A cutter of batches that caches the last few: all layers of a group share one batch."""

    _LIMIT = 16

    def __init__(self) -> None:
        self._known: dict[tuple[int, Tiling], tuple[GroupBatch, Work]] = {}

    def work(self, batch: GroupBatch, tiling: Tiling) -> Work:
        """Return the programs of a batch under a tiling."""
        key = (id(batch), tiling)
        entry = self._known.get(key)
        if entry is not None and entry[0] is batch:
            return entry[1]
        work = cut(host_lengths(batch), tiling, batch.page_ids.device)
        if len(self._known) >= self._LIMIT:
            self._known.clear()
        self._known[key] = (batch, work)
        return work


def host_lengths(batch: GroupBatch) -> HostLengths:
    """Return the batch's lengths in host memory; wait for the device if ``host`` is None."""
    if batch.host is not None:
        return batch.host
    return HostLengths(
        batch.query_starts.cpu(),
        batch.context_lens.cpu(),
        batch.table_starts.cpu(),
        batch.first_positions.cpu(),
    )


def cut(lengths: HostLengths, tiling: Tiling, device: torch.device) -> Work:
    """Cut a batch into programs on ``device``."""
    requests, new = _requests(lengths, tiling)
    short = _tiles(requests, np.where(new <= SHORT_TOKENS, new, 0), tiling.short_tokens)
    long = _tiles(requests, np.where(new > SHORT_TOKENS, new, 0), tiling.long_tokens)
    long = long[np.argsort(-(long[:, 3] + long[:, 5]), kind="stable")]
    items = _items(short, tiling)
    flat = torch.from_numpy(np.concatenate([items.ravel(), long.ravel()]).astype(np.int32))
    on_device = flat.to(device, non_blocking=True)
    most = int(short[:, 5].max()) if len(short) else 0
    return Work(
        on_device[: items.size].view(items.shape),
        len(short),
        most,
        on_device[items.size :].view(long.shape),
    )


def _requests(lengths: HostLengths, tiling: Tiling) -> tuple[Longs, Longs]:
    """Return each request as one tile of all its new tokens, and the number of these."""
    starts, context, tables, first = (
        getattr(lengths, name).numpy().astype(np.int64)
        for name in ("query_starts", "context_lens", "table_starts", "first_positions")
    )
    begin = first * tiling.page_tokens
    end = np.minimum(context, begin + np.diff(tables) * tiling.page_tokens)
    new = np.diff(starts)
    nothing = np.zeros_like(new)
    columns = (tables[:-1] - first, begin, end, context - new, starts[:-1], new)
    return np.stack([*columns, nothing, nothing], 1), new


def _tiles(requests: Longs, new: Longs, tokens: int) -> Longs:
    """Return the tiles of the first ``new`` tokens of each request, in order."""
    counts = -(-new // tokens)
    request = np.repeat(np.arange(len(counts)), counts)
    first = tokens * (np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts))
    tiles = requests[request]
    tiles[:, 3] += first
    tiles[:, 4] += first
    tiles[:, 5] = np.minimum(tokens, new[request] - first)
    return tiles


def _items(tiles: Longs, tiling: Tiling) -> Longs:
    """Return the sections of short tiles; a tile that reads no position has one empty section."""
    rule = AttendParams(1.0, tiling.window_tokens, chunk_tokens=tiling.chunk_tokens)
    own = tiles[:, 3]
    reads_until = np.minimum(own + tiles[:, 5], tiles[:, 2])
    lows = np.fromiter((rule.first_readable(int(p)) for p in own), np.int64, len(own))
    size = _section_tokens(own + tiles[:, 5] - lows, tiling)
    first = np.maximum(lows, tiles[:, 1]) // size
    counts = np.maximum(1, -(-reads_until // size) - first)
    starts = np.cumsum(counts) - counts
    tile = np.repeat(np.arange(len(tiles)), counts)
    begin = (first[tile] + np.arange(len(tile)) - starts[tile]) * size[tile]
    columns = (begin, begin + size[tile], starts[tile], counts[tile], tile, np.zeros_like(tile))
    return np.concatenate([tiles[tile, :6], np.stack(columns, 1)], 1)


def _section_tokens(read: Longs, tiling: Tiling) -> Longs:
    """Return the positions of a section, by the number ``read`` of a tile, local or remote."""
    wanted = np.maximum(1, -(-read // (MOST_SECTIONS * tiling.section_tokens)))
    doublings = np.ceil(np.log2(wanted)).astype(np.int64)
    return tiling.section_tokens << np.minimum(doublings, MOST_DOUBLINGS)
