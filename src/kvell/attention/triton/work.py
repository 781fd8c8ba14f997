"""Cutting of a step's attention into programs: on the host, in numpy.

A request with up to ``SHORT_TOKENS`` new tokens is *short*: its tiles are cut into sections
of the context.  Any other is *long*: a tile is one program.  The kind depends on nothing but
the request's new tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvell.attention.interface import AttendParams, HostLengths

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

HEADER_INTS = 4
"""The length of what precedes the items in memory: their number, padded to 16 bytes, since
kernels are compiled for aligned items."""

MOST_SECTIONS = 8
"""The number of sections from which a tile's sections double in size: a program waits for its
stores at the end of each section, so fewer sections wait less."""

MOST_DOUBLINGS = 2
"""The limit of doublings: a single request still has programs for a whole GPU."""

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class Lengths(NamedTuple):
    """The fields of ``HostLengths`` in numpy, int32."""

    query_starts: Ints
    context_lens: Ints
    table_starts: Ints
    first_positions: Ints

    @staticmethod
    def of(lengths: HostLengths) -> "Lengths":
        return Lengths(*(getattr(lengths, name).numpy() for name in Lengths._fields))


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

    ``items``, ``short_tiles`` and ``short_tokens`` are capacities if the tables are filled again
    for each step; else they are exact.

    :param items: [i, 12], rows of ``ITEM``; the items of a tile are adjacent.
    :param num_items: [1], the number of rows of ``items`` that are valid.
    :param short_tiles: number of tiles in ``items``.
    :param short_tokens: most tokens of a short tile.
    :param tiles: [t, 8], rows of ``TILE`` of long tiles; the tiles that read most come first.
    :param most_programs: limit of the programs that share the items, or None for one program for
        each item and place.
    """

    items: torch.Tensor
    num_items: torch.Tensor
    short_tiles: int
    short_tokens: int
    tiles: torch.Tensor
    most_programs: int | None = None

    @staticmethod
    def over(flat: torch.Tensor, capacity: int, short_tiles: int, short_tokens: int) -> "Work":
        """Return the work in one tensor: the number of items, ``capacity`` items, then tiles.

        :param flat: int32, aligned to 16 bytes.  Its first ``HEADER_INTS`` numbers are for
            the number of items.
        """
        end = HEADER_INTS + capacity * len(ITEM)
        return Work(
            flat[HEADER_INTS:end].view(capacity, len(ITEM)),
            flat[:1],
            short_tiles,
            short_tokens,
            flat[end:].view(-1, len(TILE)),
        )


def cut(lengths: HostLengths, tiling: Tiling, device: torch.device) -> Work:
    requests, new = _requests(Lengths.of(lengths), tiling)
    short = _tiles(requests, np.where(new <= SHORT_TOKENS, new, 0), tiling.short_tokens)
    long = _tiles(requests, np.where(new > SHORT_TOKENS, new, 0), tiling.long_tokens)
    long = long[np.argsort(-(long[:, 3] + long[:, 5]), kind="stable")]
    items = _items(short, tiling)
    header = np.zeros(HEADER_INTS, np.int32)
    header[0] = len(items)
    flat = torch.from_numpy(np.concatenate([header, items.ravel(), long.ravel()], dtype=np.int32))
    on_device = flat.to(device, non_blocking=True)
    most = int(short[:, 5].max()) if len(short) else 0
    return Work.over(on_device, len(items), len(short), most)


def cut_short(lengths: Lengths, tiling: Tiling) -> tuple[Longs, Longs]:
    """Return the short tiles and the items of a batch.

    :raises ValueError: if a request is not short.
    """
    requests, new = _requests(lengths, tiling)
    if len(new) and new.max() > SHORT_TOKENS:
        raise ValueError(f"lengths: a request has {new.max()} new tokens; at most {SHORT_TOKENS}")
    tiles = _tiles(requests, new, tiling.short_tokens)
    return tiles, _items(tiles, tiling)


def _requests(lengths: Lengths, tiling: Tiling) -> tuple[Longs, Longs]:
    """Return each request as one tile of all its new tokens, and the number of these."""
    starts, context, tables, first = (part.astype(np.int64) for part in lengths)
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
