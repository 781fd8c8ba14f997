"""The source of one peer's pages, for any transport."""

import threading
from collections.abc import Hashable, Sequence
from typing import Protocol

from kvell.mempool.transports.page_copies import Bytes, Piece

STOPPED = "it was stopped"
RIGHT_GONE = "the right to read was revoked"


class PageSource(Protocol):
    """A reader of one peer's pages; the thread that calls :meth:`bring` writes them.

    Implementations are :class:`.MappedPages` (mapped memory) and :class:`.TcpPages`; NCCL or NIXL
    would be others.

    :ivar lane: pulls of equal lanes run in turn, others in parallel.
    """

    lane: Hashable

    def bring(
        self, number: int, pieces: Sequence[Piece], target: Bytes, stop: threading.Event
    ) -> str:
        """Copy pieces of the peer's pool to the target, and return why they are invalid, or "".

        They are valid only if the right to read was valid when the last byte left the peer's pool.

        :param number: the number of the peer's transfer, which has the right.
        :param target: the local pool, uint8 [pool_bytes].
        :param stop: stops the copy soon after it is set.
        """
        ...

    def close(self) -> None:
        """End a running call of :meth:`bring` with a problem, without waiting for it."""
        ...
