"""How a step's attention is cut into programs: on the host, once per batch and shape.

A request with up to ``SHORT_TOKENS`` new tokens is *short*: its tiles are cut into sections
of the context.  Any other is *long*: a tile is one program.  Which of the two a request is
follows from its own new tokens alone.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvell.attention.interface import AttendParams, GroupBatch, HostLengths

SHORT_TOKENS = 16
"""New tokens up to which a request is short: decodes, and guesses that are verified."""

UNLIMITED = 1 << 30
"""A window or chunk that is none."""

TILE = ("table", "begin", "end", "first_own", "first_row", "rows", "", "")
"""A tile: where its page position 0 would stand among the page ids; the positions
[begin, end) that are stored; the position and the row in the query of its first token, and
how many tokens.  Padded to 32 bytes."""

ITEM = (*TILE[:6], "section_begin", "section_end", "first_item", "sections", "tile", "")
"""A section of a short tile: the tile; the section's positions; the tile's first item and
how many it has; the tile's number.  Padded to 48 bytes."""

MOST_SECTIONS = 8
"""Sections grow with a request's context beyond so many, by doubling: then the end of a
section, where a program waits for what it wrote, comes seldom."""

MOST_DOUBLINGS = 2
"""… but so seldom: one request alone still has programs for all of a GPU."""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tiling:
    """Tokens of tiles and sections; they follow from the heads and the rule of a layer."""

    short_tokens: int
    long_tokens: int
    section_tokens: int
    page_tokens: int
    window_tokens: int
    chunk_tokens: int


@dataclass(frozen=True)
class Work:
    """A batch's programs; int32 tables on the pool's device, sizes on the host.

    :param items: [i, 12], rows of ``ITEM``; those of a tile lie together.
    :param short_tiles: tiles that the items are of.
    :param short_tokens: most tokens of a short tile.
    :param tiles: [t, 8], rows of ``TILE``, of long tiles; those that read most come first.
    """

    items: torch.Tensor
    short_tiles: int
    short_tokens: int
    tiles: torch.Tensor


class WorkCutter:
    """Cuts batches, and remembers the last few: all layers of a group share one object."""

    _LIMIT = 16

    def __init__(self) -> None:
        self._known: dict[tuple[int, Tiling], tuple[GroupBatch, Work]] = {}

    def work(self, batch: GroupBatch, tiling: Tiling) -> Work:
        """The programs of a batch under a tiling."""
        key = (id(batch), tiling)
        known = self._known.get(key)
        if known is not None and known[0] is batch:
            return known[1]
        work = cut(host_lengths(batch), tiling, batch.page_ids.device)
        if len(self._known) >= self._LIMIT:
            self._known.clear()
        self._known[key] = (batch, work)
        return work


def host_lengths(batch: GroupBatch) -> HostLengths:
    """The batch's lengths in host memory; waits for the device if nobody kept them."""
    if batch.host is not None:
        return batch.host
    return HostLengths(
        batch.query_starts.cpu(),
        batch.context_lens.cpu(),
        batch.table_starts.cpu(),
        batch.first_positions.cpu(),
    )


def cut(lengths: HostLengths, tiling: Tiling, device: torch.device) -> Work:
    """See :class:`Work`."""
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
    """Every request as one tile of all its new tokens, and how many those are."""
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
    """The tiles of the first ``new`` tokens of each request, in order."""
    counts = -(-new // tokens)
    request = np.repeat(np.arange(len(counts)), counts)
    first = tokens * (np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts))
    tiles = requests[request]
    tiles[:, 3] += first
    tiles[:, 4] += first
    tiles[:, 5] = np.minimum(tokens, new[request] - first)
    return tiles


def _items(tiles: Longs, tiling: Tiling) -> Longs:
    """The sections of short tiles; one without a position is left an empty section."""
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
    """Positions of a section, by how many a tile reads wherever they are stored."""
    wanted = np.maximum(1, -(-read // (MOST_SECTIONS * tiling.section_tokens)))
    doublings = np.ceil(np.log2(wanted)).astype(np.int64)
    return tiling.section_tokens << np.minimum(doublings, MOST_DOUBLINGS)
