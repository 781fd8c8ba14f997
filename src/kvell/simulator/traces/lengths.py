"""Unrelated requests with lengths from papers: fixed, or with a mean and a deviation."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvell.simulator.traces.drawing import Draw, draw_unrelated, poisson_arrivals
from kvell.simulator.traces.rows import TraceRow

Lengths = npt.NDArray[np.float64]
K = 1 << 10
SHORT_MEAN_TOKENS = 60.0
"""Mean length of the short requests, in traces with short and long ones."""
MAX_OUTPUT_TOKENS = 1_000
MEAN_OUTPUT_TOKENS = 200.0
EVENING_ROUNDS = 8


@dataclass(frozen=True)
class ContextLengths:
    """Prompt and output together, as table 1 of the Infinite-LLM paper describes a trace.

    :param high: the longest, in tokens; the shortest is 1.
    :param long_share: part of the requests that are long; 1 draws all from one distribution.
        The mean of traces 0 to 2 is far below their deviation: a few requests near the end of
        the range and many short ones give that, but no single distribution does.
    """

    high: int
    mean: float
    deviation: float
    long_share: float = 1.0

    def draw(self, draw: Draw, count: int) -> npt.NDArray[np.int64]:
        """Draw lengths, int64 [count]; mean and deviation are as close as count allows."""
        longs = max(1, round(self.long_share * count))
        short = np.minimum(draw.exponential(SHORT_MEAN_TOKENS, count - longs) + 2, self.high)
        mean, deviation = self._of_the_long(short, count)
        long = _evened(draw, longs, (1.0, float(self.high)), mean, deviation)
        lengths = draw.permutation(np.concatenate([short, long]))
        whole: npt.NDArray[np.int64] = np.clip(np.rint(lengths), 2, self.high).astype(np.int64)
        return whole

    def _of_the_long(self, short: Lengths, count: int) -> tuple[float, float]:
        longs = count - len(short)
        mean = (self.mean * count - float(short.sum())) / longs
        square = (self.deviation**2 + self.mean**2) * count - float((short**2).sum())
        spread = max(square / longs - mean**2, 0.0)
        return min(mean, 0.98 * self.high), float(np.sqrt(spread))


INFINITE_LLM = (
    ContextLengths(60_000, 1_233, 7_785.68, 0.0235),
    ContextLengths(60_000, 712, 5_531.4, 0.0155),
    ContextLengths(60_000, 469, 3_506.36, 0.0155),
    ContextLengths(200_000, 56_362, 28_787.78),
    ContextLengths(280_000, 75_650, 39_479.42),
    ContextLengths(600_000, 160_239, 87_906.67),
    ContextLengths(480_000, 128_804, 70_647.93),
    ContextLengths(1_200_000, 293_945, 172_169.14),
    ContextLengths(2_000_000, 498_609, 261_817.24),
)
"""The nine traces of table 1: 0 to 2 are short, 3 to 8 long."""


def fixed_lengths(prompt_tokens: int, output_tokens: int) -> Callable[[Draw, int], list[TraceRow]]:
    def make(draw: Draw, count: int) -> list[TraceRow]:
        prompts = np.full(count, prompt_tokens, np.int64)
        outputs = np.full(count, output_tokens, np.int64)
        return draw_unrelated(poisson_arrivals(draw, count), prompts, outputs)

    return make


def contexts(lengths: ContextLengths) -> Callable[[Draw, int], list[TraceRow]]:
    """Return a generator of requests whose prompt and output together have these lengths.

    The paper does not say how much of it is output: here at most half, and 200 tokens on
    average where there is room.
    """

    def make(draw: Draw, count: int) -> list[TraceRow]:
        whole = lengths.draw(draw, count)
        wanted = np.minimum(draw.exponential(MEAN_OUTPUT_TOKENS, count) + 1, MAX_OUTPUT_TOKENS)
        outputs = np.minimum(wanted.astype(np.int64), whole // 2)
        return draw_unrelated(poisson_arrivals(draw, count), whole - outputs, outputs)

    return make


def _evened(
    draw: Draw, count: int, bounds: tuple[float, float], mean: float, deviation: float
) -> Lengths:
    low, high = bounds
    centre, spread = (mean - low) / (high - low), deviation / (high - low)
    weight = max(centre * (1 - centre) / max(spread, 1e-9) ** 2 - 1, 0.1)
    lengths: Lengths = low + (high - low) * draw.beta(centre * weight, (1 - centre) * weight, count)
    for _ in range(EVENING_ROUNDS):  # the other values make up for what the bounds cut off
        scale = deviation / max(float(lengths.std()), 1e-9) if count > 1 else 1.0
        lengths = np.clip(mean + (lengths - float(lengths.mean())) * scale, low, high)
    return lengths
