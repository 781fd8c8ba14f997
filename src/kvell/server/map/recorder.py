"""Samples of a front for the memory map's history, taken once a second."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Generic, TypeVar

from kvell.engine.protocol.statistics import LoadStats, Stats
from kvell.front.front import Front
from kvell.server.map.figures import bytes_by_use
from kvell.server.map.history import (
    MOST_INSTANCES,
    SAMPLE_SECONDS,
    HistoryRow,
    HistorySample,
    InstanceLoans,
    InstanceSample,
    MapHistory,
    loans_of,
    sections_lent,
)
from kvell.server.metrics.front_metrics import ServerMetrics

STALE_SECONDS = 2.0
"""Older statistics of instances are not recorded."""
UP = ("serving", "draining")


@asynccontextmanager
async def running(work: Callable[[], Coroutine[object, object, None]]) -> AsyncIterator[None]:
    """Run ``work`` as a task until the block ends."""
    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class HistoryRecorder:
    """The history of a front, and the samples that are added to it."""

    def __init__(self, front: Front, metrics: ServerMetrics) -> None:
        self._front, self._metrics = front, metrics
        self.history = MapHistory()
        self._stats: Mapping[str, Stats] = {}
        self._stats_seconds = 0.0

    def loans(self) -> dict[str, InstanceLoans]:
        """Return the loans of every instance, by the debtors' last heartbeats."""
        instances = self._front.instances()
        return loans_of(
            {status.instance_id: line.placements for status, line in instances},
            {
                status.instance_id: status.report.facts.section_bytes if status.report else 0
                for status, _ in instances
            },
        )

    def note_stats(self, stats: Mapping[str, Stats]) -> None:
        self._stats = stats
        self._stats_seconds = self._front.now_seconds()

    def sample(self) -> None:
        now_seconds = self._front.now_seconds()
        if not self.history.takes_sample(now_seconds):
            return
        is_fresh = now_seconds - self._stats_seconds <= STALE_SECONDS
        stats = self._stats if is_fresh else {}
        loans = self.loans()
        loads = {
            status.instance_id: status.report.load
            for status, _ in self._front.instances()[:MOST_INSTANCES]
            if status.report is not None and status.report.load is not None and status.state in UP
        }
        entries = self._front.entries()
        row = HistoryRow(
            now_seconds,
            *self._metrics.token_totals(),
            sum(load.running for load in loads.values()),
            len(entries.waiting) + sum(load.waiting for load in loads.values()),
            {
                name: instance_sample(load, loans[name], stats.get(name))
                for name, load in loads.items()
            },
        )
        rungs = {name: stats[name].rungs for name in loads if name in stats}
        latencies = self._metrics.take_latencies()
        lent = sections_lent(loans)
        self.history.add(HistorySample(row, *latencies, entries.transfers, lent, rungs))

    def recording(self) -> AbstractAsyncContextManager[None]:
        """Add a sample each second while the block runs."""
        return running(self._sample_periodically)

    async def _sample_periodically(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_SECONDS)


def instance_sample(load: LoadStats, loans: InstanceLoans, stats: Stats | None) -> InstanceSample:
    """Return the memory of an instance by its load, and by its statistics if there are any."""
    uses = {} if stats is None else bytes_by_use(stats)
    return InstanceSample(
        load.pool_bytes,
        load.pool_bytes - load.free_bytes,
        load.cached_bytes,
        loans.lent,
        loans.borrowed,
        uses.get("activation"),
        uses.get("cpu_buffer"),
    )


Made = TypeVar("Made")


class LatestAnswer(Generic[Made]):
    """The latest answer; many viewers cost no more than one.

    One answer is made at a time, and all viewers that came before its beginning share it.

    :param every_seconds: shortest interval from the beginning of one refresh to the next; 0 shows
        a viewer no answer that was begun before it came.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[Made]],
        now_seconds: Callable[[], float],
        every_seconds: float = 0.0,
    ) -> None:
        self._make, self._now_seconds = make, now_seconds
        self._every_seconds = every_seconds
        self._made: tuple[int, float, Made] | None = None
        self._begun = 0
        self._lock = asyncio.Lock()

    async def latest(self) -> Made:
        """Return the latest answer, or a new one once the interval has passed."""
        begun_before = self._begun
        async with self._lock:  # a caller that waited for the lock finds a new answer
            now = self._now_seconds()
            if self._made is not None:
                number, begun_seconds, answer = self._made
                if number > begun_before or now - begun_seconds < self._every_seconds:
                    return answer
            self._begun += 1
            number = self._begun
            answer = await self._make()
            self._made = number, now, answer
            return answer
