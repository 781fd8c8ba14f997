"""The last three minutes of a server, sampled once a second; pure.

A sample has what the front has anyway: counters of its metrics, heartbeats of instances, and
statistics if a viewer of the memory map has just asked instances for them.
"""

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from kvell.cluster.steering.placements import Placement
from kvell.front.request_log import LogEntry
from kvell.front.routes import NO_TRANSFER, RequestTransfer, TransferKind, TransferTotals
from kvell.vocabulary import SECTION_TOKENS

LoanPair = tuple[str, str]
"""A creditor and its debtor."""
MOST_PAIRS = 64
"""The most kinds of transfers to list, the most frequent ones."""


class PeerSections(Struct, frozen=True):
    """The sections that an instance lends to a peer or borrows from it.

    :param requests: number of requests whose sections these are.
    """

    peer: str
    sections: int
    requests: int


class InstanceLoans(Struct, frozen=True):
    """The loans of one instance.

    :param section_bytes: memory of a section of ``section_tokens`` tokens; 0: it cannot borrow.
    :param lends: loans to debtors; ``borrows`` are from creditors.
    """

    section_bytes: int = 0
    section_tokens: int = SECTION_TOKENS
    lends: tuple[PeerSections, ...] = ()
    borrows: tuple[PeerSections, ...] = ()

    @property
    def lent(self) -> int:
        return sum(peer.sections for peer in self.lends)

    @property
    def borrowed(self) -> int:
        return sum(peer.sections for peer in self.borrows)


class TransferRow(Struct, frozen=True):
    """The transfers of one kind from one instance to another, or the ended loans of a creditor.

    :param recent: transfers that ended within the history; of ended loans, the most sections that
        were lent at once.
    """

    kind: TransferKind | Literal["loan"]
    source: str
    target: str
    running: int
    recent: int


def loans_of(
    placements: Mapping[str, Placement], section_bytes: Mapping[str, int]
) -> dict[str, InstanceLoans]:
    """Return the loans of every instance.

    :param placements: reported places of the KV cache of requests that borrow, by debtor.
    :param section_bytes: memory of a section that an instance can borrow, by instance.
    """
    sections: Counter[tuple[str, str]] = Counter()
    requests: dict[tuple[str, str], set[str]] = {}
    for debtor, entries in placements.items():
        for entry in entries:
            if not entry.local:
                sections[debtor, entry.inst_id] += entry.num_blocks
                requests.setdefault((debtor, entry.inst_id), set()).add(entry.req_id)
    lends: dict[str, list[PeerSections]] = {}
    borrows: dict[str, list[PeerSections]] = {}
    for (debtor, creditor), count in sorted(sections.items()):
        number = len(requests[debtor, creditor])
        lends.setdefault(creditor, []).append(PeerSections(debtor, count, number))
        borrows.setdefault(debtor, []).append(PeerSections(creditor, count, number))
    return {
        name: InstanceLoans(
            section_bytes.get(name, 0),
            SECTION_TOKENS,
            tuple(lends.get(name, ())),
            tuple(borrows.get(name, ())),
        )
        for name in section_bytes.keys() | placements.keys()
    }


def sections_lent(loans: Mapping[str, InstanceLoans]) -> dict[LoanPair, int]:
    """Return the number of sections that each creditor lends to each debtor."""
    return {
        (creditor, peer.peer): peer.sections
        for creditor, lending in loans.items()
        for peer in lending.lends
    }


def ended_loans(
    now: Mapping[LoanPair, int], samples: Iterable[Mapping[LoanPair, int]]
) -> list[TransferRow]:
    """Return the loans of the history that have ended, by creditor and debtor.

    :param now: the number of sections that each creditor lends to each debtor now.
    """
    most: dict[LoanPair, int] = {}
    for sample in samples:
        for pair, sections in sample.items():
            most[pair] = max(sections, most.get(pair, 0))
    ended = sorted(pair for pair in most.keys() - now.keys() if most[pair])
    return [TransferRow("loan", *pair, 0, most[pair]) for pair in ended[:MOST_PAIRS]]


def transfer_rows(
    in_flight: Iterable[LogEntry],
    now: Mapping[RequestTransfer, TransferTotals],
    before: Mapping[RequestTransfer, TransferTotals],
) -> list[TransferRow]:
    """Return the transfers that run or ran within the history, the most frequent first."""
    running: Counter[RequestTransfer] = Counter()
    for entry in in_flight:
        if entry.goes_to:
            kind: TransferKind = "move" if entry.is_migrating else "handover"
            running[RequestTransfer(kind, entry.line, entry.goes_to)] += 1
        if entry.pulls_from and entry.pending_prompt_tokens:
            running[RequestTransfer("pull", entry.pulls_from, entry.line)] += 1
    recent = {
        pair: totals.requests - before.get(pair, NO_TRANSFER).requests
        for pair, totals in now.items()
        if pair.source  # else those of removed instances, in one sum
    }
    pairs = [pair for pair in running.keys() | recent.keys() if running[pair] or recent.get(pair)]
    rows = [TransferRow(*pair, running[pair], recent.get(pair, 0)) for pair in pairs]
    rows.sort(key=lambda row: (-row.running, -row.recent, row.source, row.target, row.kind))
    return rows[:MOST_PAIRS]


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
class HistorySample:
    """One sample.

    :param first_tokens: latest times to first token since the sample before, in seconds.
    :param next_tokens: the same of times per further output token.
    :param loans: the number of sections that each creditor lends to each debtor.
    :param rungs: page allocations of instances by rung so far, where they are known.
    """

    row: HistoryRow
    first_tokens: Sequence[float] = ()
    next_tokens: Sequence[float] = ()
    transfers: Mapping[RequestTransfer, TransferTotals] = field(default_factory=dict)
    loans: Mapping[LoanPair, int] = field(default_factory=dict)
    rungs: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class MapHistory:
    """The samples of the last ``HISTORY_SECONDS``, at most one per ``SAMPLE_SECONDS``."""

    def __init__(self) -> None:
        self._samples: deque[HistorySample] = deque(maxlen=MOST_SAMPLES)
        self._medians: tuple[float | None, float | None] = None, None

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def oldest(self) -> HistorySample | None:
        """The oldest sample; None before the first."""
        return self._samples[0] if self._samples else None

    def loans(self) -> list[Mapping[LoanPair, int]]:
        return [sample.loans for sample in self._samples]

    def takes_sample(self, now_seconds: float) -> bool:
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
        self._medians = (
            _median(value for sample in self._samples for value in sample.first_tokens),
            _median(value for sample in self._samples for value in sample.next_tokens),
        )

    def rows_after(self, after_seconds: float) -> list[HistoryRow]:
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
        """Return the median times to first token and per further token; None without tokens."""
        return self._medians

    def rungs_before(self, instance_id: str) -> Mapping[str, int]:
        """Return the oldest known page allocations of an instance by rung; empty if unknown."""
        allocations = (sample.rungs for sample in self._samples if instance_id in sample.rungs)
        return next((rungs[instance_id] for rungs in allocations), {})


def _median(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return statistics.median(numbers) if numbers else None
