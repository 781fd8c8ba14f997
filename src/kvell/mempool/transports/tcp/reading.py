"""What is said on a connection for pages, and in which pieces they come.

::

    puller                                        owner
      │ ── ReadPages(transfer, extents) ─────────► │
      │ ◄── PieceHead(size, checksum), bytes ───── │  as often as there are pieces
      │ ◄── ReadEnded("") ──────────────────────── │  the right stood after the last byte was read

Both sides cut the extents alike, so a piece needs no address.  A pull that is given up hangs up:
what was still on its way belongs to no later one.
"""

from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvell.mempool.transports.rights import Extent

PIECE_BYTES = 1 << 20
"""Most bytes of a piece: what is sent, and checked, at once."""
PIECE_PARTS = 256
"""Most parts of a piece that do not lie together."""
MOST_EXTENTS = 8192
"""Of one request; a longer pull makes several."""
REQUEST_BYTES = 16 * MOST_EXTENTS + 256
REPLY_BYTES = 4096
"""Most bytes of what stands between pieces."""


class ReadPages(Struct, frozen=True, tag=True):
    """Send these bytes of your pool.

    :param number: of your transfer that offered them.
    :param extents: offset and size in bytes of each, little-endian int64 pairs.
    """

    number: int
    extents: bytes


class PieceHead(Struct, frozen=True, tag=True):
    """So many bytes follow, with this crc32."""

    size_bytes: int
    checksum: int


class ReadEnded(Struct, frozen=True, tag=True):
    """Everything was sent and may be used; or why not."""

    problem: str


Reply = PieceHead | ReadEnded


def packed(extents: Iterable[Extent]) -> bytes:
    """Extents as they are sent."""
    return np.asarray(list(extents), "<i8").tobytes()


def unpacked(data: bytes, pool_bytes: int) -> list[Extent]:
    """Extents as they came.

    :raises ValueError: if they are none, too many, or not all inside the pool.
    """
    if not data or len(data) % 16 or len(data) > 16 * MOST_EXTENTS:
        raise ValueError("there are no such extents")
    found: npt.NDArray[np.int64] = np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, 2)
    offsets, sizes = found.T
    inside = (offsets >= 0) & (sizes > 0) & (sizes <= pool_bytes) & (offsets <= pool_bytes - sizes)
    if not inside.all() or sizes.sum() > pool_bytes:
        raise ValueError("pages beyond the sender's memory were offered")
    return [(offset, size) for offset, size in found.tolist()]


def in_pieces(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Cut extents into pieces of parts; where depends on their sizes alone."""
    piece: list[Extent] = []
    left_bytes = PIECE_BYTES
    for begin, size_bytes in extents:
        done_bytes = 0
        while done_bytes < size_bytes:
            part_bytes = min(size_bytes - done_bytes, left_bytes)
            piece.append((begin + done_bytes, part_bytes))
            done_bytes += part_bytes
            left_bytes -= part_bytes
            if not left_bytes or len(piece) == PIECE_PARTS:
                yield piece
                piece, left_bytes = [], PIECE_BYTES
    if piece:
        yield piece


def checksum(views: Sequence[memoryview]) -> int:
    """The crc32 of parts, one behind the other."""
    found = 0
    for view in views:
        found = crc32(view, found)
    return found
