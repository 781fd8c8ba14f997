"""The pages of a peer on this host: its memory and its rights, mapped read-only."""

import mmap
import os
import threading
from collections.abc import Hashable, Sequence

import numpy as np

from kvell.errors import TryLater
from kvell.mempool.entries import NOT_IN_PLACE
from kvell.mempool.transports.neighbours import MappedPeers
from kvell.mempool.transports.page_copies import Bytes, Piece, copy_pieces
from kvell.mempool.transports.rights import RightsOfPeer
from kvell.mempool.transports.source import RIGHT_GONE, STOPPED
from kvell.wire.frames import ProtocolError

BATCH_PIECES = 64
"""The number of pieces between two checks of the stop event."""


class MappedPages:
    """A :class:`.PageSource` over mapped memory; copies of all peers run in turn, at its speed.

    :param descriptors: of the peer's pool and its rights. This object closes them.
    :raises ProtocolError: when they cannot be mapped.
    """

    lane: Hashable = "mapped"

    def __init__(self, pool_bytes: int, descriptors: Sequence[int]) -> None:
        pool, rights = descriptors
        try:
            if os.fstat(pool).st_size < pool_bytes:
                raise ProtocolError("it is smaller than it says")
            self._map = mmap.mmap(pool, pool_bytes, prot=mmap.PROT_READ)
            self.rights = RightsOfPeer(rights)
        except (OSError, ValueError, ProtocolError) as error:
            os.close(pool)
            raise ProtocolError(f"its memory cannot be mapped ({error})") from error
        finally:
            os.close(rights)
        self._descriptor, self._pool_bytes = pool, pool_bytes
        self._neighbours: MappedPeers | None = None
        self._first_large = NOT_IN_PLACE

    def bring(
        self, number: int, pieces: Sequence[Piece], target: Bytes, stop: threading.Event
    ) -> str:
        source = np.frombuffer(self._map, np.uint8)
        if any(
            piece.source < 0 or piece.source + piece.size_bytes > len(source) for piece in pieces
        ):
            return "pages beyond the sender's memory were offered"
        for start in range(0, len(pieces), BATCH_PIECES):
            if stop.is_set():
                return STOPPED
            copy_pieces(pieces[start : start + BATCH_PIECES], source, target)
        return "" if self.rights.stands(number) else RIGHT_GONE

    def put_behind(self, neighbours: MappedPeers) -> int:
        """Map the peer's pool again after this instance's pool, where attention can read it.

        :returns: the number of its first large page there, or ``NOT_IN_PLACE`` without free room.
        """
        try:
            self._first_large = neighbours.map(self._descriptor, self._pool_bytes)
        except TryLater:
            return NOT_IN_PLACE  # its pages can still be copied
        self._neighbours = neighbours
        return self._first_large

    def take_away(self) -> None:
        if self._neighbours is not None:
            self._neighbours.unmap(self._first_large)
            self._neighbours = None

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
