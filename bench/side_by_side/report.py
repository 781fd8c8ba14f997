"""From rounds to medians, ratios and shares of the machine's limit; pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.machine import Roofline
from bench.side_by_side.model_size import ModelSize
from bench.side_by_side.scenarios import Figures, Scenario

Rounds = Mapping[str, Sequence[Figures]]
"""System to its figures, round by round; every system has the same rounds."""


def summary(
    scenario: Scenario, rounds: Rounds, limit: float | None, starts: int = 1
) -> dict[str, Any]:
    """Figures of one scenario by system: medians, spread, ratio to the first, share of the limit.

    ``decode_share_of_limit`` counts only tokens after the first, by the clients' median time per
    token, so prefill is excluded.  ``spread`` is (largest − smallest) / median of the system's
    rounds: the machine's noise.  ``ratio`` is the median of the rounds' own ratios, so that a
    disturbance of a round affects both sides.

    :param starts: of all systems, with as many rounds each.
    """
    first = next(iter(rounds))
    return {
        "scenario": scenario.name,
        "figure": scenario.figure,
        "limit": limit,
        "systems": {
            name: {
                "median": medians(figures),
                "rounds": [one[scenario.figure] for one in figures],
                "spread": spread([one[scenario.figure] for one in figures]),
                "ratio": ratio(rounds[first], figures, scenario.figure),
                "ratio_error": ratio_error(rounds[first], figures, scenario.figure, starts),
                "share_of_limit": _share(figures, scenario.figure, limit),
                "decode_share_of_limit": _decode_share(scenario, figures, limit),
            }
            for name, figures in rounds.items()
        },
    }


def medians(figures: Sequence[Figures]) -> Figures:
    """Of every figure that all rounds have."""
    names = [name for name in figures[0] if all(name in one for one in figures)]
    return {name: statistics.median(one[name] for one in figures) for name in names}


def spread(values: Sequence[float]) -> float:
    """(largest − smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def ratio(ours: Sequence[Figures], theirs: Sequence[Figures], figure: str) -> float:
    """The first system's figure over this one's: the median of the rounds."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(mine[figure] / other[figure] for mine, other in pairs)


def ratio_error(
    ours: Sequence[Figures], theirs: Sequence[Figures], figure: str, starts: int
) -> float | None:
    """Twice the standard error of the starts' own ratios; None of fewer than three."""
    if starts < 3:
        return None
    each = len(ours) // starts
    spans = [slice(begin, begin + each) for begin in range(0, starts * each, each)]
    ratios = [ratio(ours[one], theirs[one], figure) for one in spans]
    return 2 * statistics.stdev(ratios) / math.sqrt(starts)


def limit_of(scenario: Scenario, size: ModelSize, roofline: Roofline) -> float | None:
    """The limit by reading bytes (decode) or multiplying (prefill) alone; None for a mix."""
    if not scenario.is_rectangular:
        return None
    if scenario.figure == "prompt_tokens_per_second":
        return roofline.prefill_tokens_per_second(size.prefill_parameters)
    mean_context = scenario.prompt_tokens + scenario.output_tokens / 2
    kv_bytes = mean_context * size.kv_token_bytes
    return roofline.decode_tokens_per_second(size.weight_bytes, scenario.requests, kv_bytes)


def table_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """System, median, spread, times the first is faster, shares of the limit, TTFT, TPOT."""
    rows: list[tuple[str, ...]] = []
    for name, system in found["systems"].items():
        median = system["median"]
        rows.append(
            (
                name,
                f"{median[found['figure']]:,.1f}",
                f"{system['spread']:.0%}",
                _times(system["ratio"], system.get("ratio_error")),
                _percent(system["share_of_limit"]),
                _percent(system["decode_share_of_limit"]),
                _milliseconds(median.get("ttft_p50_seconds")),
                _milliseconds(median.get("tpot_p50_seconds")),
            )
        )
    return rows


def _times(ratio: float, error: float | None) -> str:
    return f"{ratio:.2f}×" if error is None else f"{ratio:.3f}× ±{error:.3f}"


def _share(figures: Sequence[Figures], name: str, limit: float | None) -> float | None:
    return None if limit is None else statistics.median(one[name] for one in figures) / limit


def _decode_share(
    scenario: Scenario, figures: Sequence[Figures], limit: float | None
) -> float | None:
    tpots = [one["tpot_p50_seconds"] for one in figures if "tpot_p50_seconds" in one]
    if limit is None or scenario.figure != "output_tokens_per_second" or not tpots:
        return None
    return scenario.requests / statistics.median(tpots) / limit


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:,.1f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
