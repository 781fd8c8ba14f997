"""The fit of the worth of cached chunks to counts: hazards by class and age, and their index.

A *hazard* is the probability that a chunk which reached an age bucket returns within it.  Any
one class has few returns, so classes share statistics::

    hazard[class, age] = shape of its hint ── own shape of its kind
                         × factor of its kind × factor of its output length
                         × the residual, by output length and age

A class's own estimates shrink towards the shared ones; the fewer returns support them, the more
they shrink (``SHAPE_WEIGHT``).  A factor is 1 unless enough events support another value.

The *index* of a class at an age is the largest rate of returns per time of residence that keeping a
chunk from that age on can earn, over all times to give it up (Gittins).  It is made to fall with
age, so that the oldest chunk of a class is evicted first.
"""

import numpy as np

from kvell.prefix.eviction.hazard import AGES, HINTS, KINDS, OUTPUTS, Floats, age_bounds

PARTIAL = 0
"""The kind without hint and output length."""

SHAPE_WEIGHT = 50.0
"""The weight of the shared estimate, in expected returns."""
HINT_WEIGHT = 5.0
_PRIOR_RETURNS, _PRIOR_ENTRIES = 1e-3, 1.0
_MOST = 0.95
_LARGEST_FACTOR = 8.0
_ROUNDS = 3
_TINY = 1e-12


def fit(entered: Floats, returned: Floats, events: Floats) -> Floats:
    """Return the worth of a chunk by class and age, float64 [KINDS * HINTS * OUTPUTS, AGES].

    :param entered: as in :func:`hazards`, in any shape of this size; so is ``returned``.
    :param events: in any shape of this size.
    """
    shape = (KINDS, HINTS, OUTPUTS, AGES)
    chances = hazards(entered.reshape(shape), returned.reshape(shape), events.reshape(shape[:-1]))
    return index_of(chances.reshape(-1, AGES))


def hazards(entered: Floats, returned: Floats, events: Floats) -> Floats:
    """Return the probability of return within each bucket [KINDS, HINTS, OUTPUTS, AGES].

    :param entered: weight of chunks that reached each age [KINDS, HINTS, OUTPUTS, AGES].
    :param returned: weight of chunks that returned at each age, in the same shape.
    :param events: number of runs that returned [KINDS, HINTS, OUTPUTS].
    """
    shapes = _own_shapes(_shapes_of_hints(entered, returned), entered, returned)
    of_kind, of_output = _factors(shapes, entered, returned, events)
    estimate = shapes[:, :, None, :] * of_kind[:, :, None, None] * of_output[:, None, :, None]
    expected = _smooth((entered * estimate)[PARTIAL + 1 :].sum((0, 1)))
    counted = _smooth(returned[PARTIAL + 1 :].sum((0, 1)))
    estimate[PARTIAL + 1 :] *= (counted + SHAPE_WEIGHT) / (expected + SHAPE_WEIGHT)
    return np.minimum(estimate, _MOST)


def index_of(chances: Floats) -> Floats:
    """Return the best rate of returns per time of residence from each bucket on; it falls with age.

    :param chances: hazards [n, AGES].
    :returns: float64 [n, AGES].
    """
    widths = np.diff(age_bounds()).astype(np.float64)[:, None]
    of_age = np.ascontiguousarray(chances.T)  # a row is one age of all classes: contiguous
    start = np.ones((1, of_age.shape[1]))
    alive = np.concatenate([start, np.cumprod(1 - of_age, axis=0)])
    spent = np.cumsum(alive[:-1] * widths * (1 - of_age / 2), axis=0)
    spent = np.concatenate([0 * start, spent])
    rates = np.empty_like(of_age)
    for age in range(AGES):
        returns = alive[age] - alive[age + 1 :]
        time = np.maximum(spent[age + 1 :] - spent[age], _TINY)
        np.max(np.divide(returns, time, out=returns), axis=0, out=rates[age])
    return np.minimum.accumulate(rates, axis=0).T


def _shapes_of_hints(entered: Floats, returned: Floats) -> Floats:
    """Return the hazard by hint and age [HINTS, AGES], shrunk towards that of all hints."""
    entries, returns = _smooth(entered.sum((0, 1, 2))), _smooth(returned.sum((0, 1, 2)))
    of_all = np.minimum((returns + _PRIOR_RETURNS) / (entries + _PRIOR_ENTRIES), _MOST)
    own_entries, own_returns = _smooth(entered.sum((0, 2))), _smooth(returned.sum((0, 2)))
    mixed = (own_returns + HINT_WEIGHT * of_all) / (own_entries + HINT_WEIGHT)
    return np.minimum(mixed, _MOST)


def _own_shapes(shared: Floats, entered: Floats, returned: Floats) -> Floats:
    """Return the hazard by kind, hint and age, scaled to the shared one's total."""
    entries, returns = entered.sum(2), returned.sum(2)
    expected = (entries * shared).sum(2)
    ratio = np.maximum(returns.sum(2) / np.maximum(expected, _TINY), 1e-3)[:, :, None]
    mixed = _smooth(returns) / ratio + SHAPE_WEIGHT * shared
    shapes: Floats = np.minimum(mixed / (_smooth(entries) + SHAPE_WEIGHT), _MOST)
    return shapes


def _factors(
    shapes: Floats, entered: Floats, returned: Floats, events: Floats
) -> tuple[Floats, Floats]:
    """Return factors of kind and hint [KINDS, HINTS], and of output lengths [KINDS, OUTPUTS]."""
    of_kind, of_output = np.ones((KINDS, HINTS)), np.ones(OUTPUTS)
    by_output = np.ones((KINDS, OUTPUTS))
    for _ in range(_ROUNDS):
        weights = (entered * shapes[:, :, None, :]).sum(3)
        expected = (weights * by_output[:, None, :]).sum(2)
        of_kind = _believed(returned.sum((2, 3)), expected, events.sum(2))
        expected = (weights * of_kind[:, :, None])[PARTIAL + 1 :].sum((0, 1))
        counted = returned[PARTIAL + 1 :].sum((0, 1, 3))
        of_output = _believed(counted, expected, events[PARTIAL + 1 :].sum((0, 1)))
        by_output[PARTIAL + 1 :] = of_output
    return of_kind, by_output


def _believed(counted: Floats, expected: Floats, events: Floats) -> Floats:
    """Return the ratio of counted to expected returns, shrunk towards 1 by one standard error."""
    size = np.log((counted + 1e-6) / (expected + 1e-6))
    error = 1 / np.sqrt(np.maximum(events, 1e-9))
    kept = np.sign(size) * np.maximum(np.abs(size) - error, 0)
    factors: Floats = np.clip(np.exp(kept), 1 / _LARGEST_FACTOR, _LARGEST_FACTOR)
    return factors


def _smooth(rows: Floats) -> Floats:
    """Return the average of each age and its neighbours, along the last axis."""
    wide = np.concatenate([rows[..., :1], rows, rows[..., -1:]], axis=-1)
    smoothed: Floats = wide[..., :-2] / 4 + wide[..., 1:-1] / 2 + wide[..., 2:] / 4
    return smoothed
