"""Timing of a design's steps on a rig: each point in turn, round after round."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvell.calibration.design import Point
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
    """All timings of one point."""

    point: Point
    steps: list[TimedStep] = field(default_factory=list)

    def median(self) -> MeasuredStep:
        """Return the point's median as one measured step."""
        seconds = [step.seconds for step in self.steps]
        return MeasuredStep(self.steps[0].work, float(np.quantile(seconds, QUANTILE)))

    @property
    def spread(self) -> float:
        """The interquartile range of the repeats, relative to the median."""
        low, middle, high = np.quantile([step.seconds for step in self.steps], (0.25, 0.5, 0.75))
        return float((high - low) / middle)


def measure(
    rig: Rig, points: Sequence[Point], progress: Progress, rounds: int = ROUNDS
) -> list[Repeats]:
    """Time each point in ``rounds`` rounds, so that a disturbance meets all of them alike.

    The first round is not counted: memory is touched for the first time in it.
    """
    points_repeats = [Repeats(point) for point in points]
    for turn in range(rounds + 1):
        for index, repeats in enumerate(points_repeats):
            progress("timing steps", (turn + index / len(points_repeats)) / (rounds + 1))
            steps = time_point(rig, repeats.point)
            if turn:
                repeats.steps += steps
    rig.clear()
    return points_repeats


def time_point(rig: Rig, point: Point) -> list[TimedStep]:
    """Time a point's step once in a round; decode steps several times."""
    rig.decoding([point.context_tokens] * point.decodes)
    if point.new_tokens:
        return [rig.prefill(point.cached_tokens, point.new_tokens)]
    return [rig.step() for _ in range(STEPS_PER_VISIT)][1:]
