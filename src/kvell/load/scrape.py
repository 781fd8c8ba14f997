"""What a server's ``/metrics`` say of a run: counters after it less counters before it."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kvell.load.wire import Client, ConnectionFailed

METRICS = "/metrics"
PREFIXES = ("kvell:", "vllm:")
QUERIES, HITS = "prefix_cache_queries_total", "prefix_cache_hits_total"
PREEMPTIONS = "num_preemptions_total"
COUNTERS = (QUERIES, HITS, PREEMPTIONS)


@dataclass(frozen=True)
class Counters:
    """Values of the counters that a server has, summed over its labels."""

    values: dict[str, float]

    def since(self, before: "Counters") -> dict[str, float | int]:
        """``prefix_cache_hit_rate`` and ``preemptions`` of what came in between; what is unknown
        is left out, and so is what a restart in between has set back."""
        grown = {
            name: value - before.values[name]
            for name, value in self.values.items()
            if value >= before.values.get(name, float("inf"))
        }
        found: dict[str, float | int] = {}
        if grown.get(QUERIES) and HITS in grown:
            found["prefix_cache_hit_rate"] = grown[HITS] / grown[QUERIES]
        if PREEMPTIONS in grown:
            found["preemptions"] = int(grown[PREEMPTIONS])
        return found


def parsed(text: str) -> Counters:
    """Kvell's and vLLM's counters in Prometheus's text; nothing if it is something else."""
    values: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = _known(sample.name)
                if name is not None:
                    values[name] = values.get(name, 0.0) + sample.value
    except (ValueError, KeyError, IndexError):
        return Counters({})
    return Counters(values)


async def scraped(client: Client) -> Counters:
    """The counters of a server now; none if it has no metrics."""
    try:
        status, body = await client.get(METRICS)
    except ConnectionFailed:
        return Counters({})
    return parsed(body.decode("utf-8", "replace")) if status == 200 else Counters({})


def _known(sample: str) -> str | None:
    for prefix in PREFIXES:
        if sample.startswith(prefix) and sample.removeprefix(prefix) in COUNTERS:
            return sample.removeprefix(prefix)
    return None
