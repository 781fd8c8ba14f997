"""From a record to figures: where the time between two steps goes, and the callbacks' cost.

::

    …─ operators ─┤ sampling, commit, sending, waiting, plan, arrays ├─ operators ─…
                  └───────────────────── seam ──────────────────────┘
       └────────────────────────── step ─────────────────────────────┘
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench.engine.seams.recorder import OPERATORS, Record, Span

MIN_STEPS = 16
"""Least number of consecutive steps of a round, with the whole batch decoding."""
ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class Step:
    """One decode step of the whole batch, and the seam after it; in seconds.

    :param own_operators: by the clock of the loop's thread, as is ``own_seam``.
    """

    operators: float
    stages: Mapping[str, float]
    own_operators: float
    own_seam: float
    has_callbacks: bool

    @property
    def seam(self) -> float:
        """From the last operator to the next step's first."""
        return sum(self.stages.values())

    @property
    def share(self) -> float:
        """The seam, as a part of the step."""
        return self.seam / (self.operators + self.seam)

    @property
    def own_share(self) -> float:
        """The share by the thread's clock, which excludes time that others took its core."""
        return self.own_seam / (self.own_operators + self.own_seam)


def rounds_of(record: Record, batch: int) -> list[list[Step]]:
    """Runs of steps in which ``batch`` requests decode; a seam lies between two of them."""
    operators = [index for index, span in enumerate(record.spans) if span[0] == OPERATORS]
    rounds: list[list[Step]] = [[]]
    for number, (here, after) in enumerate(pairwise(operators)):
        if record.plans[number] == record.plans[number + 1] == (batch, batch):
            rounds[-1].append(_step(record, here, after, number))
        else:
            rounds.append([])
    return [steps for steps in rounds if len(steps) >= MIN_STEPS]


def _step(record: Record, here: int, after: int, number: int) -> Step:
    """Build a step; spans are ordered by end: calls around the next operators follow them."""
    around = [*record.spans[here : after + 1], *_unfinished(record.spans, after)]
    _, begin, end = record.spans[here]
    (own_begin, own_end), (own_next, _) = record.own[number : number + 2]
    return Step(
        end - begin,
        stages_between(around, end, record.spans[after][1]),
        own_end - own_begin,
        own_next - own_end,
        record.with_callbacks[number],
    )


def _unfinished(spans: Sequence[Span], after: int) -> Iterator[Span]:
    """Calls that had begun when the next operators did, and ended later."""
    begin = spans[after][1]
    for span in spans[after + 1 :]:
        if span[0] == OPERATORS:
            return
        if span[1] < begin:
            yield span


def stages_between(spans: Sequence[Span], begin: float, end: float) -> dict[str, float]:
    """Seconds of each stage in an interval; a nested call counts for its own stage only."""
    inside = [(s, max(b, begin), min(e, end)) for s, b, e in spans if b < end and e > begin]
    inside.sort(key=lambda span: (span[1], -span[2]))
    found: dict[str, float] = {}

    def add(stage: str, seconds: float) -> None:
        if seconds > 0:
            found[stage] = found.get(stage, 0.0) + seconds

    open_calls: list[tuple[str, float]] = [(ELSEWHERE, end)]
    at = begin
    for stage, starts, ends in [*inside, ("", end, end)]:
        while open_calls[-1][1] <= starts and len(open_calls) > 1:
            closed, until = open_calls.pop()
            add(closed, until - at)
            at = max(at, until)
        add(open_calls[-1][0], starts - at)
        at = max(at, starts)
        open_calls.append((stage, ends))
    return found


def callbacks_cost(steps: Sequence[Step]) -> float:
    """Operators with callbacks over those of their neighbours without, less one; the median."""
    ratios = [
        2 * middle.operators / (before.operators + after.operators) - 1
        for before, middle, after in zip(steps, steps[1:], steps[2:], strict=False)
        if middle.has_callbacks and not before.has_callbacks and not after.has_callbacks
    ]
    return median(ratios)


def medians(steps: Sequence[Step]) -> dict[str, float]:
    """Median seconds of each stage over the steps."""
    names = {name for one in steps for name in one.stages}
    return {name: median(one.stages.get(name, 0.0) for one in steps) for name in sorted(names)}
