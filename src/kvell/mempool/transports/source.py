"""How pages of one peer are read, whatever they travel over."""

import threading
from collections.abc import Hashable, Sequence
from typing import Protocol

from kvell.mempool.transports.page_copies import Bytes, Piece

STOPPED = "it was stopped"
RIGHT_GONE = "the right to read was gone"


class PageSource(Protocol):
    """Reads pages of one peer; the thread that calls :meth:`bring` writes them.

    Implementations: :class:`.MappedPages` (its memory, mapped) and :class:`.TcpPages`; one over
    NCCL or NIXL would be another.

    :ivar lane: pulls of equal lanes run in turn, others side by side.
    """

    lane: Hashable

    def bring(
        self, number: int, pieces: Sequence[Piece], target: Bytes, stop: threading.Event
    ) -> str:
        """Copy pieces of the peer's pool into the target; returns why they do not count, or "".

        They count only if the right to read stood when the last byte left the peer's pool.

        :param number: of the peer's transfer, which has the right.
        :param target: own pool, uint8 [pool_bytes].
        :param stop: when it is set, nothing is written any more soon.
        """
        ...

    def close(self) -> None:
        """Read no more: a call of :meth:`bring` that is under way ends with a problem.

        It does not wait for that.
        """
        ...
