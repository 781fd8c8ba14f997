"""What a server's ``/metrics`` says of the requests between two moments.  Pure."""

from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from bench.load.reports import Told, ToolFailed

Totals = Mapping[str, float]
"""Samples by name, summed over their labels."""
PREFIX = "kvell:"
ENDS, PROMPT_TOKENS, OUTPUT_TOKENS = (
    "request_success_total",
    "prompt_tokens_total",
    "generation_tokens_total",
)
HISTOGRAMS = {
    "ttft_seconds": "time_to_first_token_seconds",
    "tpot_seconds": "request_time_per_output_token_seconds",
    "e2e_seconds": "e2e_request_latency_seconds",
}
"""The histogram whose mean stands beside each figure of a tool."""


def totals(text: str) -> Totals:
    """Totals of a page in Prometheus's text format."""
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name.removeprefix(PREFIX)] += sample.value
    return found


def told_between(before: Totals, after: Totals) -> Told:
    """What the server says of the requests between two pages.

    Every end counts as a request, a cancelled one too: a tool that asks for more than it reports
    shows as a difference.

    :raises ToolFailed: if no request was answered.
    """

    def since(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    def mean(histogram: str) -> float:
        count = since(f"{histogram}_count")
        if not count:
            raise ToolFailed(f"the server's {histogram} counted nothing")
        return since(f"{histogram}_sum") / count

    return Told(
        round(since(ENDS)),
        round(since(PROMPT_TOKENS)),
        round(since(OUTPUT_TOKENS)),
        {figure: mean(histogram) for figure, histogram in HISTOGRAMS.items()},
    )
