"""The time that a calibration may take."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvell.calibration.design import Point
from kvell.clock import Clock


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
