"""The execution of pulls from peers, on separate threads."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvell.memory import GroupSpec
from kvell.mempool.transfers.actions import Pull
from kvell.mempool.transfers.messages import Transfer
from kvell.mempool.transports.page_copies import Bytes, Piece, parts_of, pieces_of
from kvell.mempool.transports.source import STOPPED, PageSource
from kvell.pages.stages import BY_LAYER, join_stages, stages_of


class StagedPull:
    """The bytes of a pull, each returned once when it is written.

    :param pull: a pull with ``stages``; its pages are of one model.
    """

    def __init__(self, groups: Sequence[GroupSpec], pull: Pull) -> None:
        self._groups, self._rows = groups, pull.rows
        model = groups[pull.rows[0, 0]].model if len(pull.rows) else ""
        self._stages = stages_of(groups, model, pull.stages)
        self._given = 0

    def written(self, stage: int) -> list[Piece]:
        """Return the pieces to copy once the stages up to this one are written; often none."""
        until = min(stage + 1, len(self._stages))
        if until <= self._given:
            return []
        parts = join_stages(self._stages[self._given : until])
        self._given = until
        return parts_of(self._groups, self._rows, parts)

    def rest(self) -> list[Piece]:
        """Return the remaining pieces once all is written, with groups not written by layer.

        If no piece was returned before, whole pages are aggregated, as they are without stages.
        """
        if not self._given:
            return pieces_of(self._groups, self._rows)
        left = self.written(len(self._stages))
        beside = [i for i, group in enumerate(self._groups) if group.kind not in BY_LAYER]
        return left + pieces_of(self._groups, self._rows[np.isin(self._rows[:, 0], beside)])


THREADS = 8
"""The most peers from which pages are pulled concurrently; others wait."""
REMEMBERED = 256
"""The number of transfers whose written stages are stored, since a pull may begin later."""


@dataclass(eq=False)
class _Pulling:
    """A running pull.

    :ivar staged: the bytes to copy by stage; None if all bytes are written already.
    :ivar has_ended: whether its end was reported; then it writes no more.
    """

    transfer: Transfer
    source: PageSource | None
    staged: StagedPull | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    is_last: bool = False
    has_ended: bool = False


class PullExecutor:
    """An executor of pulls; each ends with one call of ``ended(transfer, problem)`` on its thread.

    Pulls of one lane run in turn, so that a slow peer delays only itself.  A pull in stages takes a
    turn for each written stage, and uses no thread while it waits for the next.  All methods are
    called on one thread.

    :param memory: the local pool, uint8 [pool_bytes].
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        memory: Bytes,
        ended: Callable[[Transfer, str], None],
    ) -> None:
        self._groups, self._memory, self._ended = groups, memory, ended
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvell-mover")
        self._pulling: dict[Transfer, _Pulling] = {}
        self._written: dict[Transfer, int] = {}
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}
        self.copied_bytes = 0

    def pull(self, pull: Pull, source: PageSource | None) -> None:
        """Begin to copy from a peer; ``source`` is None if the peer is no longer connected."""
        pulling = self._pulling[pull.transfer] = _Pulling(pull.transfer, source)
        if not pull.stages or source is None:
            self._last(pulling, partial(pieces_of, self._groups, pull.rows))
            return
        pulling.staged = StagedPull(self._groups, pull)
        self._bring_written(pulling, self._written.get(pull.transfer, -1))

    def written(self, transfer: Transfer, stage: int) -> None:
        """Record that the sender has written the stages up to this one, maybe before its offer."""
        stage = max(stage, self._written.pop(transfer, -1))
        self._written[transfer] = stage
        if len(self._written) > REMEMBERED:
            del self._written[next(iter(self._written))]
        pulling = self._pulling.get(transfer)
        if pulling is not None:
            self._bring_written(pulling, stage)

    def rest(self, transfer: Transfer) -> None:
        """Copy the rest of a pull in stages, now written; no effect if the pull has ended."""
        pulling = self._pulling.get(transfer)
        if pulling is not None and pulling.staged is not None:
            self._last(pulling, pulling.staged.rest)

    def stop(self, transfer: Transfer) -> None:
        """Stop a pull as soon as possible; no effect if the pull has ended."""
        pulling = self._pulling.get(transfer)
        if pulling is not None:
            pulling.stop.set()
            self._last(pulling, list)

    def close(self) -> None:
        for transfer in list(self._pulling):
            self.stop(transfer)
        self._threads.shutdown()

    def _bring_written(self, pulling: _Pulling, stage: int) -> None:
        if pulling.staged is None or pulling.is_last:
            return
        pieces = pulling.staged.written(stage)
        if pieces:
            self._ask(pulling, partial(self._run, pulling, lambda: pieces))

    def _last(self, pulling: _Pulling, pieces: Callable[[], list[Piece]]) -> None:
        if not pulling.is_last:
            pulling.is_last = True
            self._ask(pulling, partial(self._run, pulling, pieces, is_last=True))

    def _ask(self, pulling: _Pulling, run: Callable[[], None]) -> None:
        lane = None if pulling.source is None else pulling.source.lane
        with self._lock:
            if lane in self._waiting:
                self._waiting[lane].append(run)
                return
            self._waiting[lane] = deque()
        self._threads.submit(self._in_turn, lane, run)

    def _in_turn(self, lane: Hashable, run: Callable[[], None]) -> None:
        while True:
            run()
            with self._lock:
                if not self._waiting[lane]:
                    del self._waiting[lane]
                    return
                run = self._waiting[lane].popleft()

    def _run(
        self, pulling: _Pulling, pieces: Callable[[], list[Piece]], *, is_last: bool = False
    ) -> None:
        """Copy some pieces. A pull ends after its last pieces, or with an earlier problem."""
        if pulling.has_ended:
            return
        try:
            problem = self._brought(pulling, pieces)
        except Exception as error:  # any error: this pull writes no more
            problem = f"copying failed: {error}"
        if problem or is_last:
            pulling.has_ended = True
            del self._pulling[pulling.transfer]
            self._ended(pulling.transfer, problem)

    def _brought(self, pulling: _Pulling, wanted: Callable[[], list[Piece]]) -> str:
        """Copy some pieces and return why they are invalid, or ""."""
        if pulling.source is None:
            return "its sender has ended"
        if pulling.stop.is_set():
            return STOPPED
        pieces = wanted()
        number = pulling.transfer.number
        problem = pulling.source.bring(number, pieces, self._memory, pulling.stop)
        if not problem:
            with self._lock:
                self.copied_bytes += sum(piece.size_bytes for piece in pieces)
        return problem
