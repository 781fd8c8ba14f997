"""Messages on a connection for pages, and the division of pages into pieces.

::

    puller                                        owner
      │ ── ReadPages(transfer, extents) ─────────► │
      │ ◄── PieceHead(size, checksum), bytes ───── │  once for each piece
      │ ◄── ReadEnded("") ──────────────────────── │  the right was valid after the last byte

Both sides divide the extents in the same way, so a piece needs no address.  A stopped pull closes
the connection, so that its bytes cannot be mistaken for those of a later pull.
"""

from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvell.mempool.transports.rights import Extent

PIECE_BYTES = 1 << 20
"""The largest size of a piece, the unit of sending and checking."""
PIECE_PARTS = 256
"""The most disjoint parts of a piece."""
MOST_EXTENTS = 8192
"""The most extents of one request; a longer pull makes several."""
REQUEST_BYTES = 16 * MOST_EXTENTS + 256
REPLY_BYTES = 4096
"""The largest size of a message between pieces."""


class ReadPages(Struct, frozen=True, tag=True):
    """A request for bytes of the owner's pool.

    :param number: the number of the owner's transfer that offered them.
    :param extents: offset and size in bytes of each, little-endian int64 pairs.
    """

    number: int
    extents: bytes


class PieceHead(Struct, frozen=True, tag=True):
    """The head of a piece: the number of bytes that follow, and their crc32."""

    size_bytes: int
    checksum: int


class ReadEnded(Struct, frozen=True, tag=True):
    """The end of an answer; ``problem`` is "" if all bytes were sent and are valid."""

    problem: str


Reply = PieceHead | ReadEnded


def pack(extents: Iterable[Extent]) -> bytes:
    return np.asarray(list(extents), "<i8").tobytes()


def unpack(data: bytes, pool_bytes: int) -> list[Extent]:
    """Return the decoded extents.

    :raises ValueError: if there are none or too many, or one is outside the pool.
    """
    if not data or len(data) % 16 or len(data) > 16 * MOST_EXTENTS:
        raise ValueError("there are no such extents")
    extents: npt.NDArray[np.int64] = np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, 2)
    offsets, sizes = extents.T
    inside = (offsets >= 0) & (sizes > 0) & (sizes <= pool_bytes) & (offsets <= pool_bytes - sizes)
    if not inside.all() or sizes.sum() > pool_bytes:
        raise ValueError("pages beyond the sender's memory were offered")
    return [(offset, size) for offset, size in extents.tolist()]


def in_pieces(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Yield the pieces of extents, each as its parts; the cuts depend only on sizes."""
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
                piece = []
                left_bytes = PIECE_BYTES
    if piece:
        yield piece


def checksum(views: Sequence[memoryview]) -> int:
    """Return the crc32 of concatenated parts."""
    crc = 0
    for view in views:
        crc = crc32(view, crc)
    return crc
