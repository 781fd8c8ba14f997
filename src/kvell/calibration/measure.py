"""Timing of a design's steps on a rig: each point in turn, round after round."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvell.calibration.design import Point, TimeBudget
from kvell.calibration.rig import Rig, TimedStep
from kvell.cost.fit import MeasuredStep
from kvell.models.sources.progress import Progress

ROUNDS = 5
STEPS_PER_VISIT = 3
"""Decode steps timed in one round; the first warms up and is not counted."""
QUANTILE = 0.5
"""Quantile of the repeats: a prediction includes the usual disturbances."""


@dataclass
class Repeats:
    """All timings of one point.

    :ivar first: those of the first round, when memory is touched for the first time.
    """

    point: Point
    steps: list[TimedStep] = field(default_factory=list)
    first: list[TimedStep] = field(default_factory=list)

    def median(self) -> MeasuredStep:
        seconds = [step.seconds for step in self._counted]
        return MeasuredStep(self._counted[0].work, float(np.quantile(seconds, QUANTILE)))

    @property
    def spread(self) -> float:
        seconds = [step.seconds for step in self._counted]
        low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
        return float((high - low) / middle)

    @property
    def _counted(self) -> list[TimedStep]:
        return self.steps or self.first


def measure(
    rig: Rig,
    points: Sequence[Point],
    progress: Progress,
    rounds: int = ROUNDS,
    budget: TimeBudget | None = None,
) -> list[Repeats]:
    """Time each point in ``rounds`` rounds, so that a disturbance meets all of them alike.

    The first round is not counted: memory is touched for the first time in it.

    :param budget: points that exceed it are left out.  The first round counts for points that no
        other round could repeat.
    :returns: timings of the points that were timed, in their order.
    """
    points_repeats = [Repeats(point) for point in points]
    for turn in range(rounds + 1):
        for index, repeats in enumerate(points_repeats):
            progress("timing steps", (turn + index / len(points_repeats)) / (rounds + 1))
            steps = _time_within(rig, repeats.point, budget)
            if turn:
                repeats.steps += steps
            else:
                repeats.first = steps
    rig.clear()
    return [repeats for repeats in points_repeats if repeats.steps or repeats.first]


def _time_within(rig: Rig, point: Point, budget: TimeBudget | None) -> list[TimedStep]:
    """Time a point once; return nothing if the budget does not allow it."""
    if budget is None:
        return time_point(rig, point)
    if not budget.allows(point):
        return []
    began_seconds = budget.clock.now_seconds()
    steps = time_point(rig, point)
    budget.note(point, began_seconds)
    return steps


def time_point(rig: Rig, point: Point) -> list[TimedStep]:
    """Time a point's step once in a round; decode steps several times."""
    rig.decoding([point.context_tokens] * point.decodes)
    if point.new_tokens:
        return [rig.prefill(point.cached_tokens, point.new_tokens)]
    return [rig.step() for _ in range(STEPS_PER_VISIT)][1:]
