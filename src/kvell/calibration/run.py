"""A calibration without the serving: measure, fit, judge."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch

from kvell.calibration.design import (
    HELD_OUT,
    LEARNED,
    PRICED,
    QUICK_HELD_OUT,
    QUICK_LEARNED,
    Point,
    TimeBudget,
    possible,
)
from kvell.calibration.host_copies import ROUNDS as COPY_ROUNDS
from kvell.calibration.host_copies import measure_host_copies
from kvell.calibration.prints import machine_print, model_print, software_print
from kvell.calibration.rig import CannotTimeError, Rig, SkippingModel, TimedStep
from kvell.clock import Clock
from kvell.cost.amounts import ModelShape, shape_of
from kvell.cost.calibration import Calibration, HeldOut, ModelPrint, Serving
from kvell.cost.fit import MeasuredStep, fit_operators, median_error
from kvell.cost.operators import Operators
from kvell.engine.assembly import (
    EngineOptions,
    build_engine,
    load_model,
)
from kvell.engine.engine import Engine
from kvell.engine.running.copies.copies_under_pass import copies_beside_passes
from kvell.memory import requests_that_fit
from kvell.models.loading.loading import check_model
from kvell.models.paged_model import PagedModel
from kvell.models.sources.progress import Progress
from kvell.models.sources.source import resolve_model
from kvell.simulator.hardware.model_cost import model_cost

OUTPUT_TOKENS = 64
"""Tokens that a request may generate beyond the start of its step."""


@dataclass(frozen=True)
class Subject:
    """An engine for a rig, and the facts about its model.

    :param copies_under_pass: whether it would copy pages to a CPU buffer during its passes.
    """

    engine: Engine
    model: SkippingModel
    shape: ModelShape
    print: ModelPrint
    inner_size: int
    dtype: torch.dtype
    copies_under_pass: bool = False

    @property
    def paged_model(self) -> PagedModel:
        return self.model.whole

    def rig(self, clock: Clock, seed: int = 0) -> Rig:
        """Return a rig that owns the engine."""
        return Rig(self.engine, self.model, clock, seed)

    def can(self, points: tuple[Point, ...]) -> list[Point]:
        """Return the points that pool and model allow."""
        limits, layout = self.engine.core.limits, self.engine.core.memory.layout

        def fits(requests: int, tokens: int) -> bool:
            whole = tokens + OUTPUT_TOKENS
            if whole > limits.max_model_len:
                return False
            return requests <= requests_that_fit(layout, whole, limits.max_num_seqs)

        return possible(points, fits, limits.max_num_batched_tokens, limits.max_num_seqs)


def subject_of(model: PagedModel, name: str, options: EngineOptions) -> Subject:
    """Return a loaded model in an engine; prompts are drawn from its vocabulary's ids.

    :raises ChangeSomething: as :func:`kvell.engine.assembly.build_engine`.
    """
    description = model.description
    skipping = SkippingModel(model)
    # The engine takes any object that behaves like a model.
    engine = build_engine(skipping, name, options)  # type: ignore[arg-type]
    return Subject(
        engine,
        skipping,
        shape_of(description.layers),
        print_of(model, name),
        description.hidden_size,
        model.dtype,
        copies_beside_passes(options.copies_under_pass),
    )


def print_of(model: PagedModel, name: str) -> ModelPrint:
    description = model.description
    cost = model_cost(model.module.config, description, model.dtype.itemsize)
    dtype = str(model.dtype).removeprefix("torch.")
    return model_print(name, dtype, description, cost.active_weights)


def load_subject(
    name: str,
    dtype: str,
    device: str,
    options: EngineOptions,
    cache_dir: Path,
    progress: Progress,
    kv_cache_dtype: str = "auto",
    threads: int | None = None,
) -> Subject:
    """Load the model that ``--model`` names.

    :param threads: of a step; None: torch's number.

    :raises ChangeSomething: if there is no such model, or it cannot be served.
    """
    path = resolve_model(name, cache_dir, progress)
    check_model(path)
    model = load_model(path, dtype, device, progress, kv_cache_dtype, threads=threads)
    return subject_of(model, name, options)


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


ROWS = 512
TRIES = 7
COPY_BYTES = 64 << 20
SHORTEST_SECONDS = 1e-9


def product_flops_per_second(
    clock: Clock, inner: int, outer: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Profile one compute-bound operator, which stands for all: N of MemServe §5.3.2.

    :returns: the best of several [512, inner] × [inner, outer].
    """
    rows = torch.ones((ROWS, inner), dtype=dtype, device=device)
    weight = torch.ones((outer, inner), dtype=dtype, device=device)
    seconds = _best(clock, lambda: torch.nn.functional.linear(rows, weight), device)
    return 2.0 * ROWS * inner * outer / seconds


def copy_bytes_per_second(
    clock: Clock, device: torch.device, size_bytes: int = COPY_BYTES
) -> float:
    """Measure copies from the host's memory to the device's."""
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    return size_bytes / _best(clock, lambda: target.copy_(source), device)


def _best(clock: Clock, work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(TRIES):
        started = clock.now_seconds()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, max(SHORTEST_SECONDS, clock.now_seconds() - started))
    return best


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
    :param threads: of the engine's steps; None: torch's number.
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
