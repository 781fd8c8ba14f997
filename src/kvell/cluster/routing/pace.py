"""How long prompts take on an instance: its prices, corrected by what its latest prompts took."""

from dataclasses import dataclass
from math import log

import numpy as np
import numpy.typing as npt

from kvell.cost.least_squares import non_negative
from kvell.cost.prices import USUAL_PRICES, ExecCosts

KEPT = 0.9
"""Weight of a prompt relative to the one after it: some ten prompts show a change."""
PRIOR = 0.05
"""Weight of the prices: that of one prompt in which each cost is 0.22 of the time."""
SURPRISES = 2.0
"""A prompt that misses by more than this many usual misses counts for less."""
LEAST_SURPRISE = 0.1
"""Smallest miss that does, in logarithms."""
MISS_WEIGHT = 0.25
"""Weight of the newest prompt in the usual miss."""
USUAL_PAIR_TOKENS = USUAL_PRICES.pair_seconds / USUAL_PRICES.token_seconds
"""Usual cost of a pair, relative to a token."""
LEAST_SECONDS = 1e-6
"""Least time of a prompt, for prices of 0."""
MOST_SECONDS = 1e6
"""Largest time of a prompt that shows a pace."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PromptWork:
    """The part of prompts that is computed.

    :param step_seconds: price of their steps, and of the decodes in them.
    :param pairs: of query and key (:func:`kvell.cost.prices.pairs`).
    """

    step_seconds: float
    tokens: int
    pairs: int

    def priced_seconds(self, costs: ExecCosts) -> float:
        seconds = self.step_seconds + self.tokens * costs.token_seconds
        return seconds + self.pairs * costs.pair_seconds


class Pace:
    """Prices of prompts that follow what prompts took; of instances with equal prices on one host.

    A calibration takes two seconds, and other programs may disturb it: then it takes the cost of
    pairs for one of tokens, or prices all too high.  So three costs are fitted to the latest
    prompts: of steps, of tokens and of pairs.  Where prompts do not show the difference, they
    keep the ratios of the prices.
    """

    def __init__(self, costs: ExecCosts) -> None:
        token_seconds = max(costs.token_seconds, LEAST_SECONDS)
        self._units = np.array([1.0, token_seconds, token_seconds * USUAL_PAIR_TOKENS])
        self._priced = np.array([1.0, costs.token_seconds, costs.pair_seconds]) / self._units
        self._costs = (1.0, costs.token_seconds, costs.pair_seconds)
        self._usual_miss: float | None = None
        self._products = np.zeros((3, 3))
        self._results = np.zeros(3)

    def seconds(self, work: PromptWork) -> float:
        step, token, pair = self._costs
        seconds = step * work.step_seconds + token * work.tokens + pair * work.pairs
        return max(LEAST_SECONDS, seconds)

    def note(self, work: PromptWork, seconds: float) -> None:
        """Learn from a prompt.

        :param seconds: what it took, less what instances on the same processors cost it.
        """
        amounts = self._units * (work.step_seconds, work.tokens, work.pairs)
        priced_seconds = float(amounts @ self._priced)
        seconds = max(LEAST_SECONDS, seconds)
        if seconds > MOST_SECONDS or priced_seconds < LEAST_SECONDS:
            return
        part = amounts / max(seconds, priced_seconds / MOST_SECONDS)
        weight = self._weight(abs(log(seconds / self.seconds(work))))
        self._products = KEPT * self._products + weight * np.outer(part, part)
        self._results = KEPT * self._results + weight * part
        step, token, pair = (self._units * self._fitted()).tolist()
        self._costs = (step, token, pair)

    def _weight(self, miss: float) -> float:
        """Return the weight of a prompt by its miss (Huber, 1964)."""
        if self._usual_miss is None:
            self._usual_miss = 0.0
            return 1.0
        most = max(LEAST_SURPRISE, SURPRISES * self._usual_miss)
        self._usual_miss += MISS_WEIGHT * (miss - self._usual_miss)
        return min(1.0, most / max(miss, LEAST_SECONDS))

    def _fitted(self) -> Floats:
        """Return the costs with the smallest squared relative misses, none of them negative.

        The prior has the ratios of the prices, at the scale that suits the prompts best.
        """
        scale = (self._results @ self._priced) / (self._priced @ self._products @ self._priced)
        weight = PRIOR / float(scale) ** 2
        products = self._products + weight * np.eye(3)
        results = self._results + weight * scale * self._priced
        solved = np.asarray(np.linalg.solve(products, results), np.float64)
        if solved.min() >= 0:
            return solved
        upper = np.asarray(np.linalg.cholesky(products).T, np.float64)
        return non_negative(upper, np.asarray(np.linalg.solve(upper.T, results), np.float64))
