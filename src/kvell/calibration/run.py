"""A calibration without the serving: measure, fit, judge."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from kvell.calibration.design import (
    HELD_OUT,
    LEARNED,
    PRICED,
    QUICK_HELD_OUT,
    QUICK_LEARNED,
    Point,
    TimeBudget,
)
from kvell.calibration.host_copies import ROUNDS as COPY_ROUNDS
from kvell.calibration.host_copies import measure_host_copies
from kvell.calibration.prints import machine_print, software_print
from kvell.calibration.rates import copy_bytes_per_second, product_flops_per_second
from kvell.calibration.rig import CannotTimeError, Rig, TimedStep
from kvell.calibration.subject import Subject
from kvell.clock import Clock
from kvell.cost.calibration import Calibration, HeldOut, Serving
from kvell.cost.fit import MeasuredStep, fit_operators, median_error
from kvell.cost.operators import Operators
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


QUICK_ROUNDS, QUICK_COPY_ROUNDS = 2, 6
PRICED_ROUNDS = 5
PRICED_COPY_BYTES = 16 << 20
FIT_SECONDS = 0.1
"""Time of a budget that is kept for the fit and the digests."""
MOST_SHARE = 0.9


@dataclass(frozen=True)
class Outcome:
    """A calibration, and the measurements that it was made from."""

    calibration: Calibration
    learned: tuple[Repeats, ...]
    held_out: tuple[Repeats, ...]


def calibrate(
    subject: Subject,
    clock: Clock,
    progress: Progress,
    *,
    quick: bool = False,
    seed: int = 0,
    threads: int | None = None,
) -> Outcome:
    """Time steps of the engine, fit operators to most of them and judge the fit by the rest.

    :param quick: fewer points and rounds: for a first look, not for figures.
    :param threads: the number of threads of the engine's steps; None: torch's number.
    """
    warmer = subject.engine.warm()  # as a server does: no step waits for a first touch
    if warmer is not None:
        warmer.finish()
    rig = subject.rig(clock, seed)
    learned = subject.can(QUICK_LEARNED if quick else LEARNED)
    judges = subject.can(QUICK_HELD_OUT if quick else HELD_OUT)
    repeats = measure(rig, [*learned, *judges], progress, QUICK_ROUNDS if quick else ROUNDS)
    fitted_to, unseen = tuple(repeats[: len(learned)]), tuple(repeats[len(learned) :])
    device = subject.model.device
    rate = product_flops_per_second(
        clock, subject.inner_size, subject.inner_size * 2, subject.dtype, device
    )
    operators = fit_operators(subject.shape, [each.median() for each in fitted_to])
    share = constant_share(operators, subject.print.active_weights, rate)
    operators = fit_operators(subject.shape, [each.median() for each in fitted_to], share)
    made = Calibration(
        machine_print(device.type, threads),
        software_print(),
        subject.print,
        operators,
        Serving(),
        copy_bytes_per_second(clock, device),
        errors(operators, unseen),
        median(each.spread for each in repeats),
        copies=measure_host_copies(
            subject.paged_model,
            clock,
            under_pass=subject.copies_under_pass,
            rounds=QUICK_COPY_ROUNDS if quick else COPY_ROUNDS,
        ),
    )
    return Outcome(made, fitted_to, unseen)


def calibrate_within(
    subject: Subject,
    clock: Clock,
    progress: Progress,
    budget_seconds: float,
    *,
    seed: int = 0,
    threads: int | None = None,
) -> Calibration:
    """Calibrate for prices alone, in a bounded time: fewer steps, and none to judge the fit by.

    :param budget_seconds: time of all; one step of one request may exceed it.
    :raises CannotTimeError: if the pool is too small for any of the steps.
    """
    points = subject.can(PRICED)
    if not points:
        raise CannotTimeError("the pool is too small")
    budget = TimeBudget(clock, clock.now_seconds() + budget_seconds - FIT_SECONDS)
    device = subject.model.device
    copies = copy_bytes_per_second(clock, device, PRICED_COPY_BYTES)
    rig = subject.rig(clock, seed)
    repeats = measure(rig, points, progress, PRICED_ROUNDS, budget)
    return Calibration(
        machine_print(device.type, threads),
        software_print(),
        subject.print,
        fit_operators(subject.shape, [each.median() for each in repeats]),
        Serving(),
        copies,
        HeldOut(),
        median(each.spread for each in repeats),
    )


def constant_share(operators: Operators, active_weights: int, flops_per_second: float) -> float:
    """Return the share of a long prompt's seconds that its matrix products do not take."""
    knots, prices = operators.layers.knots, operators.layers.row_seconds
    token_seconds = prices[-1] if prices[-1] else operators.layers.seconds(knots[-1]) / knots[-1]
    if token_seconds <= 0:
        return 0.0
    products = 2.0 * active_weights / flops_per_second
    return min(MOST_SHARE, max(0.0, 1.0 - products / token_seconds))


def errors(operators: Operators, repeats: Sequence[Repeats]) -> HeldOut:
    """Return the relative misses of predictions by kind of step; 0 for a kind without steps."""

    def error(kind: str) -> float:
        steps = [each.median() for each in _of_kind(repeats, kind)]
        return median_error(operators.step_seconds, steps) if steps else 0.0

    return HeldOut(len(repeats), error("prefill"), error("decode"), error("mixed"))


def _of_kind(repeats: Iterable[Repeats], kind: str) -> list[Repeats]:
    return [each for each in repeats if each.point.kind == kind]
