"""From measured steps to operators: one least-squares fit over all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from kvell.cost.amounts import Amounts, ModelShape
from kvell.cost.least_squares import relative_fit
from kvell.cost.operators import Attention, Constants, Operators, Waves, spans
from kvell.cost.work import Chunk, Work

TOKEN_KNOTS = (0, 1, 2, 4, 8, 9, 16, 17, 24, 32, 33, 48, 64, 128, 256, 512)
ROW_KNOTS = (0, 1, 2, 4, 8, 9, 16, 17, 32)
"""Row counts at which prices may change; after a power of two a single row may cost a jump."""
TILES = (1, 8, 16, 32)
"""Candidates for the rows of a wave; kernels on CPUs have one of these tiles, or no visible one."""
TILE_GAIN = 0.9
"""A tile is used if its misses are at most this fraction of those without a tile."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was measured several times; ``seconds`` sums it up."""

    work: tuple[Chunk, ...]
    seconds: float


def fit_operators(
    shape: ModelShape, steps: Sequence[MeasuredStep], constant_share: float = 0.0
) -> Operators:
    """Fit operators whose sums come closest to the steps, in relative terms.

    :param constant_share: see :class:`Constants`; it does not follow from steps of one device.
    :raises ValueError: without steps, or if one took no time.
    """
    if not steps or min(step.seconds for step in steps) <= 0:
        raise ValueError("cannot fit steps that took no time")
    tries = [_fit(shape, steps, tile, constant_share) for tile in TILES]
    plain, *tiled = tries
    best = min(tiled, key=lambda fit: median_error(fit.step_seconds, steps))
    gain = median_error(best.step_seconds, steps) / median_error(plain.step_seconds, steps)
    return best if gain < TILE_GAIN else plain


def median_error(
    seconds_of: Callable[[Sequence[Work]], float], steps: Sequence[MeasuredStep]
) -> float:
    return median(abs(seconds_of(step.work) / step.seconds - 1.0) for step in steps) + 1e-12


def _fit(
    shape: ModelShape, steps: Sequence[MeasuredStep], tile: int, constant_share: float
) -> Operators:
    amounts = [shape.amounts(step.work) for step in steps]
    tokens = _seen(TOKEN_KNOTS, {each.tokens for each in amounts})
    rows = _seen(ROW_KNOTS, {each.rows for each in amounts})
    matrix = np.asarray([_row(each, tile, tokens, rows) for each in amounts], np.float64)
    prices = relative_fit(matrix, np.asarray([step.seconds for step in steps])).tolist()
    layers = len(tokens)
    head = len(tokens) + len(rows)
    pair, read, prompt, step, sequence, scan_round = prices[head:]
    return Operators(
        shape,
        Waves(tile, tokens, tuple(prices[:layers])),
        Waves(1, rows, tuple(prices[layers:head])),
        Attention(pair, read, prompt),
        Constants(step, sequence, scan_round, constant_share),
    )


def _seen(knots: Sequence[int], sizes: set[int]) -> tuple[int, ...]:
    """Return the knots with measured steps of their size and of a larger one; between knots, a
    price is a line, and after the last one the steps above it decide the price."""
    largest = max(sizes)
    return tuple(knot for knot in knots if knot == 0 or (knot in sizes and knot < largest))


def _row(amounts: Amounts, tile: int, tokens: Sequence[int], rows: Sequence[int]) -> list[float]:
    return [
        *spans(amounts.tokens, tile, tokens),
        *spans(amounts.rows, 1, rows),
        amounts.pairs,
        amounts.read_tokens,
        amounts.prompts,
        1.0,
        amounts.sequences,
        amounts.scan_rounds,
    ]
