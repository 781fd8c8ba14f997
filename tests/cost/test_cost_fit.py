"""A fit finds the prices of a machine whose steps it is shown."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cost.amounts import AttentionSpan, ModelShape
from kvell.cost.fit import MeasuredStep, fit_operators, median_error
from kvell.cost.least_squares import non_negative, relative_fit
from kvell.cost.operators import Waves
from kvell.cost.work import Chunk
from tests.cost.oracles import SHAPE, decodes, oracle, steps_of, unseen
from tests.depth import some

SHAPES = (SHAPE, ModelShape((AttentionSpan(4),)), ModelShape((AttentionSpan(2),), state_layers=2))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tile", [1, 8])
def test_steps_that_it_never_saw(shape: ModelShape, tile: int) -> None:
    machine = oracle(shape, tile)
    found = fit_operators(shape, steps_of(machine))
    for work in unseen():
        assert found.step_seconds(work) == pytest.approx(machine.step_seconds(work), rel=0.05)


def test_a_jump_behind_a_power_of_two() -> None:
    """A ninth row that costs as much as eight: libraries change kernels there."""
    machine = oracle()
    knots = (*machine.layers.knots[:5], 9, *machine.layers.knots[5:])
    prices = (*machine.layers.row_seconds[:5], 1e-2, *machine.layers.row_seconds[5:])
    machine = replace(machine, layers=Waves(1, knots, prices))
    found = fit_operators(SHAPE, steps_of(machine))
    for batch in (8, 9, 12):
        work = decodes(batch, 200)
        assert found.step_seconds(work) == pytest.approx(machine.step_seconds(work), rel=0.03)


def test_sizes_that_were_not_measured_are_between_those_that_were() -> None:
    machine = oracle()
    few = [step for step in steps_of(machine) if sum(w.count for w in step.work) in (1, 16, 64)]
    found = fit_operators(SHAPE, few)
    assert set(found.layers.knots) == {0, 1, 16}
    sizes = [found.step_seconds(decodes(n, 100)) for n in (16, 32, 48, 64)]
    assert np.diff(sizes) == pytest.approx([sizes[1] - sizes[0]] * 3, rel=0.2)


def test_tokens_beyond_the_largest_step_cost_as_much_as_those_before() -> None:
    few = [step for step in steps_of(oracle()) if sum(w.count for w in step.work) in (1, 16, 64)]
    fit = fit_operators(SHAPE, few)
    sizes = [fit.step_seconds(decodes(n, 100)) for n in (16, 64, 112)]
    assert np.diff(sizes) == pytest.approx([sizes[1] - sizes[0]] * 2)


def test_tiles_are_found() -> None:
    assert fit_operators(SHAPE, steps_of(oracle(tile=1))).layers.tile_rows == 1
    assert fit_operators(SHAPE, steps_of(oracle(tile=8))).layers.tile_rows == 8


@pytest.mark.parametrize(
    ("factor", "most"),
    [
        (lambda draw: 3.0 if draw.random() < 0.1 else 1.0, 0.03),
        (lambda draw: float(np.exp(draw.normal(0, 0.05))), 0.05),
    ],
    ids=["disturbed steps", "noise"],
)
def test_noise_and_disturbed_steps_do_not_move_it(
    factor: Callable[[np.random.Generator], float], most: float
) -> None:
    machine, draw = oracle(), np.random.default_rng(3)
    noisy = [MeasuredStep(step.work, step.seconds * factor(draw)) for step in steps_of(machine)]
    found = fit_operators(SHAPE, noisy)
    judged = [MeasuredStep(work, machine.step_seconds(work)) for work in unseen()]
    assert median_error(found.step_seconds, judged) < most


def test_no_price_is_negative() -> None:
    steps = [MeasuredStep((Chunk(0, n),), 1.0 / n) for n in (1, 2, 5, 9, 50, 400)]
    found = fit_operators(SHAPE, steps)
    assert min(*found.layers.row_seconds, *found.head.row_seconds) >= 0
    assert min(found.attention.pair_seconds, found.constants.step_seconds) >= 0


def test_steps_that_took_no_time() -> None:
    with pytest.raises(ValueError, match="took no time"):
        fit_operators(SHAPE, [MeasuredStep((Chunk(0, 1),), 0.0)])
    with pytest.raises(ValueError, match="took no time"):
        fit_operators(SHAPE, [])


class TestLeastSquares:
    def test_a_bound_that_binds(self) -> None:
        """Unbounded, the second coefficient would be -1."""
        matrix = np.asarray([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
        found = non_negative(matrix, np.asarray([2.0, 1.0, 0.0]))
        assert found == pytest.approx([1.0, 0.0])

    @some()
    @given(st.integers(0, 10**6), st.integers(1, 6))
    def test_no_other_choice_is_better(self, seed: int, columns: int) -> None:
        """Karush-Kuhn-Tucker: no slope downhill where it may go."""
        draw = np.random.default_rng(seed)
        matrix, target = draw.normal(size=(9, columns)), draw.normal(size=9)
        found = non_negative(matrix, target)
        slope = matrix.T @ (target - matrix @ found)
        assert (found >= 0).all()
        assert (slope <= 1e-8).all()
        assert np.abs(slope[found > 0]).max(initial=0.0) < 1e-8

    def test_relative_misses_count_alike(self) -> None:
        matrix = np.asarray([[1.0, 1.0], [1.0, 1000.0], [1.0, 2000.0]])
        target = matrix @ np.asarray([2.0, 3.0])
        assert relative_fit(matrix, target) == pytest.approx([2.0, 3.0])

    def test_a_column_of_zeros(self) -> None:
        matrix = np.asarray([[1.0, 0.0], [2.0, 0.0]])
        assert relative_fit(matrix, np.asarray([3.0, 6.0])) == pytest.approx([3.0, 0.0])
