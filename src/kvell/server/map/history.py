"""The last three minutes of a server, sampled once a second; pure.

A sample has what the front has anyway: counters of its metrics, heartbeats of instances, and
statistics if a viewer of the memory map has just asked instances for them.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from kvell.front.routes import RequestTransfer

HISTORY_SECONDS = 180.0
SAMPLE_SECONDS = 1.0
"""The shortest interval between two samples."""
MOST_SAMPLES = int(HISTORY_SECONDS / SAMPLE_SECONDS) + 1
MOST_INSTANCES = 64
"""The most instances of a sample, so that the history's size is bounded."""
RATE_SECONDS = 10.0
"""The time over which the present rates are averaged."""
JITTER_SECONDS = 0.05
"""A sample that is early by less counts: a sleep may end a little before its time."""


class InstanceSample(Struct, frozen=True, array_like=True):
    """The memory of one instance at one moment.

    :param pool: bytes of the KV pool.  Requests use ``kv_used`` of them, and ``kv_cached`` are
        cached.
    :param lent: number of lent sections; ``borrowed`` ones are at other instances.
    :param activation: bytes of activations in the shared pool; None: there are none, or they are
        unknown, since no viewer asked the instance.  The same for ``cpu_buffer``.
    """

    pool: int
    kv_used: int
    kv_cached: int
    lent: int
    borrowed: int
    activation: int | None = None
    cpu_buffer: int | None = None


class HistoryRow(Struct, frozen=True, array_like=True):
    """One sample, as viewers of the memory map get it.

    :param prompt_tokens: prompt tokens prefilled so far; ``output_tokens`` were sent.
    """

    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    running: int
    waiting: int
    instances: dict[str, InstanceSample]


@dataclass(frozen=True)
class LatencyCounts:
    """The numbers of observed latencies so far, by the buckets of a histogram.

    :param bounds: upper bounds of all buckets but the last, which has none, in seconds.
    :param counts: number of observations in each bucket.
    """

    bounds: Sequence[float] = ()
    counts: Sequence[int] = (0,)

    def since(self, earlier: "LatencyCounts") -> "LatencyCounts":
        """Return the observations after those of an earlier sample of the same histogram."""
        before = earlier.counts if earlier.bounds == self.bounds else (0,) * len(self.counts)
        counts = [count - old for count, old in zip(self.counts, before, strict=True)]
        return LatencyCounts(self.bounds, counts)

    def median_seconds(self) -> float | None:
        """Return the median, interpolated within its bucket; None without observations.

        A median in the last bucket is reported as that bucket's lower bound.
        """
        half, below = sum(self.counts) / 2, 0
        if not half:
            return None
        low = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if below + count >= half:
                return low + (bound - low) * (half - below) / count
            below, low = below + count, bound
        return low


@dataclass(frozen=True)
class HistorySample:
    """One sample.

    :param first_tokens: times to first tokens so far.
    :param next_tokens: times per output token so far.
    :param transfers: numbers of transfers so far.
    :param rungs: page allocations of instances by rung so far, where they are known.
    """

    row: HistoryRow
    first_tokens: LatencyCounts = LatencyCounts()
    next_tokens: LatencyCounts = LatencyCounts()
    transfers: Mapping[RequestTransfer, int] = field(default_factory=dict)
    rungs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class MapHistory:
    """The samples of the last ``HISTORY_SECONDS``, at most one per ``SAMPLE_SECONDS``."""

    def __init__(self) -> None:
        self._samples: deque[HistorySample] = deque(maxlen=MOST_SAMPLES)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def oldest(self) -> HistorySample | None:
        """The oldest sample; None before the first."""
        return self._samples[0] if self._samples else None

    def takes_sample(self, now_seconds: float) -> bool:
        """Return whether a sample may be added now."""
        if not self._samples:
            return True
        age_seconds = now_seconds - self._samples[-1].row.at_seconds
        return age_seconds >= SAMPLE_SECONDS - JITTER_SECONDS

    def add(self, sample: HistorySample) -> None:
        """Add a sample, unless it is too early, and drop those that are too old."""
        now_seconds = sample.row.at_seconds
        if not self.takes_sample(now_seconds):
            return
        self._samples.append(sample)
        while now_seconds - self._samples[0].row.at_seconds > HISTORY_SECONDS:
            self._samples.popleft()

    def rows_after(self, after_seconds: float) -> list[HistoryRow]:
        """Return the samples after a moment, the oldest first."""
        return [sample.row for sample in self._samples if sample.row.at_seconds > after_seconds]

    def rates(self) -> tuple[float | None, float | None]:
        """Return prompt and output tokens per second of the last seconds; None if unknown."""
        if len(self._samples) < 2:
            return None, None
        latest = self._samples[-1].row
        recent = (
            sample.row
            for sample in self._samples
            if latest.at_seconds - sample.row.at_seconds <= RATE_SECONDS
        )
        first = next(recent)
        if first is latest:  # the process was stopped meanwhile
            first = self._samples[-2].row
        seconds = latest.at_seconds - first.at_seconds
        return (
            (latest.prompt_tokens - first.prompt_tokens) / seconds,
            (latest.output_tokens - first.output_tokens) / seconds,
        )

    def medians(self) -> tuple[float | None, float | None]:
        """Return the median times to first token and per output token, in seconds."""
        if not self._samples:
            return None, None
        first, latest = self._samples[0], self._samples[-1]
        return (
            latest.first_tokens.since(first.first_tokens).median_seconds(),
            latest.next_tokens.since(first.next_tokens).median_seconds(),
        )

    def rungs_before(self, instance_id: str) -> Mapping[str, int]:
        """Return the oldest known page allocations of an instance by rung; empty if unknown."""
        known = (
            sample.rungs[instance_id] for sample in self._samples if instance_id in sample.rungs
        )
        return next(allocations, {})
