"""Figures of outcomes, with the same meaning for every server."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvell.load.outcome import Outcome

Figures = dict[str, float | None]


@dataclass(frozen=True)
class Objectives:
    """The latency limits of a request; None is unlimited."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None

    def met_by(self, outcome: Outcome) -> bool:
        """Return whether an outcome meets both; an answer of one token has no time per token."""
        if self.ttft_seconds is not None and outcome.ttft_seconds > self.ttft_seconds:
            return False
        tpot = outcome.tpot_seconds
        return self.tpot_seconds is None or tpot is None or tpot <= self.tpot_seconds


def summary(outcomes: Sequence[Outcome], objectives: Objectives) -> dict[str, Any]:
    """Return the figures of a run; rates are per second from the first sending to the last end.

    Latencies are of complete answers.  ``goodput`` counts complete answers that met the
    objectives, ``request_rate`` all complete answers.  ``slo_attainment`` is the share of requests
    that met the objectives, without those whose client disconnected.
    """
    complete = [outcome for outcome in outcomes if outcome.is_complete]
    seconds = duration_seconds(outcomes)
    output_tokens = sum(outcome.output_tokens for outcome in complete)
    good = sum(objectives.met_by(outcome) for outcome in complete)
    tpots = [outcome.tpot_seconds for outcome in complete]
    failures = Counter(outcome.failure for outcome in outcomes if outcome.failure is not None)
    return {
        "completed": len(complete),
        "failed": failures.total(),
        "disconnected": sum(outcome.hung_up for outcome in outcomes),
        "ttft_seconds": spread(outcome.ttft_seconds for outcome in complete),
        "tpot_seconds": spread(tpot for tpot in tpots if tpot is not None),
        "e2e_seconds": spread(outcome.e2e_seconds for outcome in complete),
        "inter_token_seconds": spread(
            gap for outcome in complete for gap in outcome.inter_token_seconds
        ),
        "request_rate": _per(len(complete), seconds),
        "output_tokens_per_second": _per(output_tokens, seconds),
        "goodput": _per(good, seconds),
        "slo_attainment": _per(good, len(complete) + failures.total()),
        "slo_ttft_seconds": objectives.ttft_seconds,
        "slo_tpot_seconds": objectives.tpot_seconds,
        "duration_seconds": seconds,
        "prompt_tokens": sum(outcome.prompt_tokens for outcome in complete),
        "output_tokens": output_tokens,
        "cached_share": _cached_share(complete),
        "open_requests_max": most_open(outcomes),
        "send_lag_seconds": spread(outcome.lag_seconds for outcome in outcomes),
        "failures": dict(failures.most_common()),
    }


def spread(values: Iterable[float]) -> Figures:
    samples = np.fromiter(values, np.float64)
    if not len(samples):
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(samples, (50, 90, 99)).tolist()
    return {"mean": float(samples.mean()), "p50": p50, "p90": p90, "p99": p99}


def duration_seconds(outcomes: Sequence[Outcome]) -> float:
    if not outcomes:
        return 0.0
    return max(o.ended_seconds for o in outcomes) - min(o.sent_seconds for o in outcomes)


def open_over_time(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """Return the number of open requests after each change, as pairs of time and number."""
    changes = [(o.sent_seconds, 1) for o in outcomes] + [(o.ended_seconds, -1) for o in outcomes]
    steps, now_open = [], 0
    for at_seconds, change in sorted(changes):
        now_open += change
        steps.append((at_seconds, now_open))
    return steps


def most_open(outcomes: Sequence[Outcome]) -> int:
    return max((count for _, count in open_over_time(outcomes)), default=0)


def _per(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _cached_share(complete: Sequence[Outcome]) -> float | None:
    """Return the share of prompt tokens reported as cached; None if the server reports none."""
    reporting = [o for o in complete if o.cached_tokens is not None]
    tokens = sum(o.prompt_tokens for o in reporting)
    return sum(o.cached_tokens or 0 for o in reporting) / tokens if tokens else None
