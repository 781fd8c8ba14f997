"""Brings pages of peers into own ones, on threads of its own."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvell.memory import GroupSpec
from kvell.mempool.transfers.actions import Pull
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transports.page_copies import Bytes, pieces_of
from kvell.mempool.transports.source import STOPPED, PageSource

THREADS = 8
"""Peers from which pages come at once; further ones wait."""


class Mover:
    """Runs pulls; each ends with one call of ``ended(transfer, problem)``, on a thread of it.

    Pulls of one lane run in turn, so that a slow peer delays only itself.

    :param memory: own pool, uint8 [pool_bytes].
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        memory: Bytes,
        ended: Callable[[Transfer, str], None],
    ) -> None:
        self._groups, self._memory, self._ended = groups, memory, ended
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvell-mover")
        self._stops: dict[Transfer, threading.Event] = {}
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}
        self.copied_bytes = 0

    def pull(self, pull: Pull, source: PageSource | None) -> None:
        """Begin to copy from a peer; None: it is not connected any more."""
        stop = self._stops[pull.transfer] = threading.Event()
        run = partial(self._run, pull, source, stop)
        lane = None if source is None else source.lane
        with self._lock:
            if lane in self._waiting:
                self._waiting[lane].append(run)
                return
            self._waiting[lane] = deque()
        self._threads.submit(self._in_turn, lane, run)

    def stop(self, transfer: Transfer) -> None:
        """Stop a pull as soon as may be; it may have ended, and not been told yet."""
        if stop := self._stops.get(transfer):
            stop.set()

    def close(self) -> None:
        """Stop all pulls and wait until nothing is written any more."""
        for stop in list(self._stops.values()):
            stop.set()
        self._threads.shutdown()

    def _in_turn(self, lane: Hashable, run: Callable[[], None]) -> None:
        """Run a pull, and then those of its lane that have come meanwhile."""
        while True:
            run()
            with self._lock:
                if not self._waiting[lane]:
                    del self._waiting[lane]
                    return
                run = self._waiting[lane].popleft()

    def _run(self, pull: Pull, source: PageSource | None, stop: threading.Event) -> None:
        try:
            problem = self._brought(pull, source, stop)
        except Exception as error:  # whatever it is, the pages are not written any more
            problem = f"copying failed: {error}"
        del self._stops[pull.transfer]
        self._ended(pull.transfer, problem)

    def _brought(self, pull: Pull, source: PageSource | None, stop: threading.Event) -> str:
        """Bring everything; why it does not count, or ""."""
        if source is None:
            return "its sender is gone"
        if stop.is_set():
            return STOPPED
        pieces = pieces_of(self._groups, pull.rows)
        problem = source.bring(pull.transfer.number, pieces, self._memory, stop)
        if not problem:
            with self._lock:
                self.copied_bytes += sum(one.size_bytes for one in pieces)
        return problem
