"""Copies pages of peers into own ones, on threads of its own."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvell.memory import GroupSpec
from kvell.mempool.transfers.actions import Pull
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transports.page_copies import Bytes, copy_pieces, pieces_of
from kvell.mempool.transports.peer import Peer

PIECE_PAGES = 64
"""Pieces between two looks whether to stop."""


class Mover:
    """Runs pulls; each ends with one call of ``ended(transfer, problem)``, on a thread of it.

    :param memory: own pool, uint8 [pool_bytes].
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        memory: Bytes,
        ended: Callable[[Transfer, str], None],
        threads: int = 1,
    ) -> None:
        self._groups, self._memory, self._ended = groups, memory, ended
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvell-mover")
        self._stops: dict[Transfer, threading.Event] = {}
        self.copied_bytes = 0

    def pull(self, pull: Pull, peer: Peer | None) -> None:
        """Begin to copy from a peer; None: it is not connected any more."""
        stop = self._stops[pull.transfer] = threading.Event()
        self._threads.submit(self._run, pull, peer, stop)

    def stop(self, transfer: Transfer) -> None:
        """Stop a pull as soon as may be."""
        self._stops[transfer].set()

    def close(self) -> None:
        """Stop all pulls and wait until nothing is written any more."""
        for stop in list(self._stops.values()):
            stop.set()
        self._threads.shutdown()

    def _run(self, pull: Pull, peer: Peer | None, stop: threading.Event) -> None:
        try:
            problem = self._copied(pull, peer, stop)
        except Exception as error:  # whatever it is, the pages are not written any more
            problem = f"copying failed: {error}"
        del self._stops[pull.transfer]
        self._ended(pull.transfer, problem)

    def _copied(self, pull: Pull, peer: Peer | None, stop: threading.Event) -> str:
        """Copy everything; why it does not count, or ""."""
        if peer is None:
            return "its sender is gone"
        source = peer.memory
        pieces = pieces_of(self._groups, pull.rows)
        if any(one.source < 0 or one.source + one.size_bytes > len(source) for one in pieces):
            return "pages beyond the sender's memory were offered"
        for start in range(0, len(pieces), PIECE_PAGES):
            if stop.is_set():
                return "it was stopped"
            some = pieces[start : start + PIECE_PAGES]
            self.copied_bytes += copy_pieces(some, source, self._memory)
        return "" if peer.rights.stands(pull.transfer.number) else "the right to read was gone"
