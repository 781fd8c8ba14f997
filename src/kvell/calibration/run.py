"""A calibration without the serving: measure, fit, judge."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from kvell.calibration.design import (
    HELD_OUT,
    LEARNED,
    PRICED,
    QUICK_HELD_OUT,
    QUICK_LEARNED,
    TimeBudget,
)
from kvell.calibration.host_copies import ROUNDS as COPY_ROUNDS
from kvell.calibration.host_copies import measure_host_copies
from kvell.calibration.measure import ROUNDS, Repeats, measure
from kvell.calibration.prints import machine_print, software_print
from kvell.calibration.rig import CannotTimeError
from kvell.calibration.subject import Subject
from kvell.clock import Clock
from kvell.cost.calibration import Calibration, HeldOut, Serving
from kvell.cost.fit import fit_operators, median_error
from kvell.cost.operators import Operators
from kvell.models.sources.progress import Progress

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
