"""Figures of a run from a server's ``/metrics``: the counters after it minus those before it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvell.load.http.client import HttpClient
from kvell.load.http.wire import ConnectionFailed

METRICS = "/metrics"
PREFIXES = ("kvell:", "vllm:")
QUERIES, HITS = "prefix_cache_queries_total", "prefix_cache_hits_total"
PREEMPTIONS = "num_preemptions_total"
DRAFTED, ACCEPTED = (f"spec_decode_num_{what}_tokens_total" for what in ("draft", "accepted"))
TOKENS = {"prompt_tokens": "prompt_tokens_total", "output_tokens": "generation_tokens_total"}
COUNTERS = frozenset((QUERIES, HITS, PREEMPTIONS, DRAFTED, ACCEPTED, *TOKENS.values()))
LATENCIES = {
    "ttft_seconds": "time_to_first_token_seconds",
    "tpot_seconds": "request_time_per_output_token_seconds",
    "e2e_seconds": "e2e_request_latency_seconds",
    "inter_token_seconds": "inter_token_latency_seconds",
    "queue_seconds": "request_queue_time_seconds",
    "prefill_seconds": "request_prefill_time_seconds",
    "decode_seconds": "request_decode_time_seconds",
}
"""The histograms by figure of a run."""
STEP_TOKENS = "iteration_tokens_total"
HISTOGRAMS = frozenset((*LATENCIES.values(), STEP_TOKENS))
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

Buckets = Mapping[float, float]
"""The number of values up to each upper bound."""


@dataclass(frozen=True)
class Histogram:
    """The values that a server observed."""

    total: float = 0.0
    buckets: Buckets = field(default_factory=dict)

    @property
    def count(self) -> float:
        return self.buckets.get(math.inf, 0.0)

    def since(self, before: "Histogram") -> "Histogram | None":
        """Return the values observed since ``before``; None after a restart of the server."""
        if self.count < before.count or self.buckets.keys() != before.buckets.keys():
            return None
        grown = {bound: n - before.buckets[bound] for bound, n in self.buckets.items()}
        return Histogram(self.total - before.total, grown)

    def spread(self) -> dict[str, float | None]:
        """Return the exact mean, and percentiles as Prometheus estimates them: values are evenly
        spread within a bucket; above the last finite bound, that bound is used."""
        percentiles = {name: self._quantile(part) for name, part in PERCENTILES.items()}
        return {"mean": self.total / self.count if self.count else None, **percentiles}

    def _quantile(self, part: float) -> float | None:
        if not self.count:
            return None
        wanted = part * self.count
        low = 0.0
        below = 0.0
        for bound, at_most in sorted(self.buckets.items()):
            if at_most >= wanted:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (wanted - below) / (at_most - below)
            low, below = bound, at_most
        return low


@dataclass(frozen=True)
class Counters:
    """The values of a server's counters and histograms, summed over labels."""

    values: dict[str, float]
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def since(self, before: "Counters") -> dict[str, Any]:
        """Return figures since ``before``, without those that are unknown or reset by a restart.


        ``prefix_cache_hit_rate``, ``preemptions``, ``prompt_tokens``, ``output_tokens``,
        ``draft_acceptance_rate``, ``tokens_per_step``, ``steps``, and each of
        :data:`LATENCIES` with its mean and percentiles.
        """
        grown = {
            name: value - before.values[name]
            for name, value in self.values.items()
            if value >= before.values.get(name, math.inf)
        }
        figures: dict[str, Any] = {}
        if grown.get(QUERIES) and HITS in grown:
            figures["prefix_cache_hit_rate"] = grown[HITS] / grown[QUERIES]
        if PREEMPTIONS in grown:
            figures["preemptions"] = int(grown[PREEMPTIONS])
        if grown.get(DRAFTED) and ACCEPTED in grown:
            figures["draft_acceptance_rate"] = grown[ACCEPTED] / grown[DRAFTED]
        figures |= {key: int(grown[name]) for key, name in TOKENS.items() if name in grown}
        for key, name in LATENCIES.items():
            seen = self._grown(before, name)
            if seen is not None and seen.count:
                figures[key] = seen.spread()
        steps = self._grown(before, STEP_TOKENS)
        if steps is not None and steps.count:
            figures["steps"] = int(steps.count)
            figures["tokens_per_step"] = steps.total / steps.count
        return figures

    def _grown(self, before: "Counters", name: str) -> Histogram | None:
        mine, earlier = self.histograms.get(name), before.histograms.get(name)
        # vLLM creates some series only with the first value: a missing series counts as empty.
        if mine is None or not (earlier or before.values):
            return None
        return mine.since(earlier or Histogram(0.0, dict.fromkeys(mine.buckets, 0.0)))


def parse(text: str) -> Counters:
    """Parse Kvell's or vLLM's counters from Prometheus text; empty for other text."""
    values: dict[str, float] = {}
    totals: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    try:
        for name, labels, value in _samples(text):
            family, _, part = name.rpartition("_")
            if name in COUNTERS:
                values[name] = values.get(name, 0.0) + value
            elif family in HISTOGRAMS and part == "sum":
                totals[family] = totals.get(family, 0.0) + value
            elif family in HISTOGRAMS and part == "bucket":
                counts = buckets.setdefault(family, {})
                bound = float(labels["le"])
                counts[bound] = counts.get(bound, 0.0) + value
    except (ValueError, KeyError, IndexError):
        return Counters({})
    histograms = {name: Histogram(totals.get(name, 0.0), buckets[name]) for name in buckets}
    return Counters(values, histograms)


async def scrape(client: HttpClient) -> Counters:
    try:
        status, body = await client.answer_to(METRICS)
    except ConnectionFailed:
        return Counters({})
    return parse(body.decode("utf-8", "replace")) if status == 200 else Counters({})


def _samples(text: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for prefix in PREFIXES:
                if sample.name.startswith(prefix):
                    yield sample.name.removeprefix(prefix), sample.labels, sample.value
