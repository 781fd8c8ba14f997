"""Lengths of prompts and outputs as a user writes them: ``512``, ``lognormal:300:200``, …"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvell.errors import ChangeSomething
from kvell.simulator.traces.drawing import Draw, draw_unrelated, poisson_arrivals
from kvell.simulator.traces.rows import TraceRow

Tokens = npt.NDArray[np.int64]
REMEDY = "write 512, 128:512, normal:512:100, lognormal:512:400 or exponential:512"
LONGEST_TOKENS = 10_000_000


@dataclass(frozen=True)
class Distribution:
    """Tokens of one request, at least 1.

    :param kind: ``fixed`` (tokens), ``uniform`` (least, most), ``normal`` or ``lognormal`` (mean,
        standard deviation), ``exponential`` (mean).
    :param numbers: the parameters of the kind, in tokens.
    """

    kind: str
    numbers: tuple[float, ...]

    def draw(self, draw: Draw, count: int) -> Tokens:
        lengths = np.rint(_DRAWS[self.kind](draw, count, *self.numbers))
        whole: Tokens = np.clip(lengths, 1, LONGEST_TOKENS).astype(np.int64)
        return whole


def parse_distribution(text: str, field: str) -> Distribution:
    """Return the distribution that ``text`` names.

    :raises ChangeSomething: naming ``field`` if there is none.
    """
    *names, last = text.split(":")
    kind = names.pop(0) if names and names[0] in _PARAMETERS else ""
    try:
        numbers = tuple(float(part) for part in (*names, last))
    except ValueError:
        numbers = ()
    kind = kind or {1: "fixed", 2: "uniform"}.get(len(numbers), "")
    if not kind or len(numbers) != _PARAMETERS[kind]:
        raise ChangeSomething(field, text, "is neither a length nor a distribution", REMEDY)
    if not all(math.isfinite(number) and 0 <= number <= LONGEST_TOKENS for number in numbers):
        raise ChangeSomething(field, text, "has a number out of range", REMEDY)
    if numbers[0] < 1 or (kind == "uniform" and numbers[1] < numbers[0]):
        raise ChangeSomething(field, text, "allows no token, or its ends are swapped", REMEDY)
    return Distribution(kind, numbers)


def independent(
    prompts: Distribution, outputs: Distribution, draw: Draw, count: int
) -> list[TraceRow]:
    arrivals = poisson_arrivals(draw, count)
    return draw_unrelated(arrivals, prompts.draw(draw, count), outputs.draw(draw, count))


def _lognormal(draw: Draw, count: int, mean: float, deviation: float) -> npt.NDArray[np.float64]:
    variance = math.log1p((deviation / mean) ** 2)
    return draw.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)


_PARAMETERS = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}
_DRAWS: dict[str, Callable[..., npt.NDArray[np.float64]]] = {
    "fixed": lambda _draw, count, tokens: np.full(count, tokens),
    "uniform": lambda draw, count, low, high: draw.uniform(low - 0.5, high + 0.5, count),
    "normal": lambda draw, count, mean, deviation: draw.normal(mean, deviation, count),
    "lognormal": _lognormal,
    "exponential": lambda draw, count, mean: draw.exponential(mean, count),
}
