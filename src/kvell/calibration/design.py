"""The steps that are measured: some for the fit, others to judge the fit.

Lengths and batches are at and between the powers of two at which kernels change: prompts after
cached prefixes of several lengths, decodes at several contexts, and both in one step. The steps
that judge lie between those of the fit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvell.clock import Clock


@dataclass(frozen=True)
class Point:
    """A step: requests that decode, and a prompt that arrives.

    :param decodes: requests, each with ``context_tokens`` before its token.
    :param new_tokens: the prompt's tokens after ``cached_tokens``; 0 for no prompt.
    """

    decodes: int = 0
    context_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0

    @property
    def kind(self) -> str:
        if not self.new_tokens:
            return "decode"
        return "mixed" if self.decodes else "prefill"

    @property
    def longest_tokens(self) -> int:
        return max(self.context_tokens, self.cached_tokens + self.new_tokens)


LEARNED = (
    *(Point(n, s) for n in (1, 2, 4, 8, 9, 16, 17, 24, 32, 33, 48, 64) for s in (16, 512)),
    *(Point(n, 2048) for n in (1, 4, 16, 32)),
    Point(1, 8192),
    Point(4, 4096),
    *(Point(0, 0, 0, x) for x in (2, 4, 8, 9, 16, 17, 24, 32, 33, 48, 64, 128, 256, 512, 1024)),
    *(Point(0, 0, c, x) for c in (512, 2048) for x in (4, 16, 64, 256, 1024)),
    Point(0, 0, 0, 2040),
    Point(0, 0, 4096, 512),
    Point(4, 512, 0, 60),
    Point(16, 256, 0, 112),
    Point(8, 1024, 512, 248),
    Point(32, 64, 0, 32),
)
"""The steps that the operators are fitted to."""

HELD_OUT = (
    *(Point(n, s) for n in (3, 6, 12, 20, 40) for s in (64, 300, 1200)),
    *(Point(0, 0, 0, x) for x in (12, 20, 40, 96, 200, 384, 768, 1500)),
    *(Point(0, 0, c, x) for c in (256, 1000, 3000) for x in (28, 100, 384)),
    Point(2, 300, 0, 100),
    Point(12, 700, 256, 40),
    Point(24, 128, 0, 300),
)
"""The steps that judge the operators."""

QUICK_LEARNED = (
    *(Point(n, s) for n in (1, 2, 4, 8, 9, 16, 17, 24, 32) for s in (16, 512)),
    Point(1, 2048),
    Point(8, 1024),
    *(Point(0, 0, 0, x) for x in (4, 8, 9, 16, 17, 32, 33, 64, 128, 256, 512, 1024)),
    *(Point(0, 0, 512, x) for x in (8, 64, 256)),
    Point(4, 512, 0, 60),
    Point(16, 64, 0, 112),
)
QUICK_HELD_OUT = (
    *(Point(n, 200) for n in (3, 6, 12, 20)),
    *(Point(0, 0, c, x) for c in (0, 256) for x in (20, 40, 96, 200, 384)),
    Point(2, 300, 0, 100),
)

PRICED = (
    Point(1, 16),
    Point(0, 0, 0, 64),
    Point(8, 16),
    Point(0, 0, 0, 256),
    Point(8, 512),
    Point(0, 0, 1024, 256),
    Point(32, 16),
    Point(0, 0, 0, 512),
    Point(0, 0, 0, 16),
    Point(4, 512, 0, 60),
    Point(1, 1024),
    Point(0, 0, 0, 1024),
)
"""The steps of a calibration for prices alone, which may end after any of them: first the base of a
decode and of a prompt, then what batches, contexts and long prompts add."""


def possible(
    points: Iterable[Point], fits: Callable[[int, int], bool], budget_tokens: int, max_seqs: int
) -> list[Point]:
    return [
        point
        for point in points
        if point.new_tokens + point.decodes <= budget_tokens
        and point.decodes < max_seqs
        and fits(point.decodes + (2 if point.new_tokens else 0), point.longest_tokens)
    ]


@dataclass
class TimeBudget:
    """A calibration's time until ``end_seconds``, and the time that each point took.

    A point that would probably exceed the budget is left out.  The first point always runs, since
    nothing is known before it.
    """

    clock: Clock
    end_seconds: float
    _seconds: dict[Point, float] = field(default_factory=dict)

    def allows(self, point: Point) -> bool:
        if not self._seconds:
            return True
        return self.clock.now_seconds() + self._expected_seconds(point) <= self.end_seconds

    def note(self, point: Point, began_seconds: float) -> None:
        self._seconds[point] = self.clock.now_seconds() - began_seconds

    def _expected_seconds(self, point: Point) -> float:
        """Return the time of its last visit, or a bound: no token costs more than in a smaller
        step."""
        if point in self._seconds:
            return self._seconds[point]
        size = _size(point)
        bounds: Iterable[float] = (
            seconds * max(1.0, size / _size(other)) for other, seconds in self._seconds.items()
        )
        return min(bounds)


def _size(point: Point) -> int:
    return point.new_tokens + point.decodes
