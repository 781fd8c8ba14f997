"""Figures of runs, their ratios and bounds."""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean, median

Figures = dict[str, float]
"""Figures of one run; names end in their unit."""
Rounds = Mapping[str, Sequence[Figures]]
"""By manager, round by round."""
LATENCIES = ("ttft_seconds", "tpot_seconds")
WITHIN = 0.03
"""Most by which Kvell's latencies without pressure may exceed those of ``paged``."""


def ratio(rounds: Rounds, figure: str) -> float:
    """Kvell over ``paged``: the median of the rounds' own ratios."""
    pairs = zip(rounds["kvell"], rounds["paged"], strict=True)
    return median(ours[figure] / theirs[figure] for ours, theirs in pairs)


def medians(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure over the rounds."""
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def mean_ratio(shapes: Mapping[str, Rounds], figure: str = "decode_tokens_per_second") -> float:
    """The geometric mean over the shapes."""
    return geometric_mean(ratio(rounds, figure) for rounds in shapes.values())


def slower_without_pressure(shapes: Mapping[str, Rounds]) -> list[str]:
    """Shapes and latencies that are more than 3 % above those of ``paged``."""
    return [
        f"{shape}: {figure} {ratio(rounds, figure) - 1:+.1%}"
        for shape, rounds in shapes.items()
        for figure in LATENCIES
        if ratio(rounds, figure) > 1 + WITHIN
    ]
