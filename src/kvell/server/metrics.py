"""Prometheus metrics under vLLM's names, in a registry of their own."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvell.engine.protocol import Finished, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
NEXT_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
LABELS = ("model_name",)


class ServerMetrics:
    """What the front measures of requests, and what instances say of themselves.

    It is the front's ``RequestObserver``; times are seconds as a request's client
    sees them, queueing included.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.instance = InstanceCollector(model_name)
        self.registry.register(self.instance)
        self._model_name = model_name
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._output_tokens = self._counter("generation_tokens", "Output tokens sent out.")
        self._first_token = self._histogram("time_to_first_token", FIRST_TOKEN_BUCKETS)
        self._next_token = self._histogram("time_per_output_token", NEXT_TOKEN_BUCKETS)
        self._latency = self._histogram("e2e_request_latency", REQUEST_BUCKETS)
        self._requests = Counter(
            "kvell:request_success",
            "Requests that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )

    def first_token(self, seconds: float) -> None:
        """The first token came so long after the request."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """``count`` more tokens came so long after those before."""
        for _ in range(count):
            self._next_token.observe(seconds / count)

    def finished(self, finished: Finished, seconds: float, output_tokens: int) -> None:
        """A request ended after so long with so many tokens sent out."""
        self._requests.labels(self._model_name, finished.reason).inc()
        self._prompt_tokens.inc(finished.prompt_tokens)
        self._output_tokens.inc(output_tokens)
        self._latency.observe(seconds)

    def render(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"kvell:{name}", text, LABELS, registry=self.registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = f"{name.replace('_', ' ').capitalize()} in seconds."
        family = Histogram(
            f"kvell:{name}_seconds", text, LABELS, buckets=buckets, registry=self.registry
        )
        return family.labels(self._model_name)


class InstanceCollector(Collector):
    """The latest :class:`Stats` as metrics; counters start anew with an incarnation."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.stats: Stats | None = None
        self.front_waiting = 0
        self.restarts = 0

    def collect(self) -> Iterator[Metric]:
        """Yield every metric that is known now."""
        up = float(self.stats is not None)
        yield self._gauge("instance_up", "Whether the instance answered.", up)
        yield self._counter("instance_restarts", "Instances started again.", self.restarts)
        if self.stats is not None:
            yield from self._of_instance(self.stats)
            yield from self._of_groups(self.stats)
            yield self._by_label("rung", "ladder_rungs", self.stats.rungs)

    def _of_instance(self, stats: Stats) -> Iterable[Metric]:
        gauge, counter = self._gauge, self._counter
        waiting = stats.waiting + self.front_waiting
        yield gauge("num_requests_running", "Requests in the running batch.", stats.running)
        yield gauge("num_requests_waiting", "Requests that wait.", waiting)
        yield gauge(
            "kv_cache_usage_perc", "Used part of the KV pool (1 is all).", stats.kv_cache_usage
        )
        yield gauge("large_pages", "Large pages of the pool.", stats.large_pages)
        yield gauge("empty_large_pages", "Large pages nobody uses.", stats.empty_large_pages)
        yield counter("steps", "Engine steps.", stats.step)
        yield counter(
            "prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries
        )
        yield counter("prefix_cache_hits", "Prompt tokens found cached.", stats.prefix_cache_hits)
        yield counter(
            "spec_decode_num_drafts", "Steps of a request with guesses.", stats.spec_decode_drafts
        )
        yield counter(
            "spec_decode_num_draft_tokens", "Guessed tokens.", stats.spec_decode_draft_tokens
        )
        yield counter(
            "spec_decode_num_accepted_tokens",
            "Tokens guessed right.",
            stats.spec_decode_accepted_tokens,
        )
        yield counter("num_preemptions", "Preempted requests.", stats.preemptions)

    def _of_groups(self, stats: Stats) -> Iterable[Metric]:
        labels = (*LABELS, "group")
        used = GaugeMetricFamily("kvell:group_used_pages", "Pages in use.", labels=labels)
        cached = GaugeMetricFamily(
            "kvell:group_cached_pages", "Pages kept for hits.", labels=labels
        )
        evicted = CounterMetricFamily("kvell:group_evicted_pages", "Pages evicted.", labels=labels)
        hits = CounterMetricFamily(
            "kvell:group_prefix_cache_hits", "Tokens of cached pages taken.", labels=labels
        )
        for group in stats.groups:
            values = (self._model_name, group.name)
            used.add_metric(values, group.used_pages)
            cached.add_metric(values, group.cached_pages)
            evicted.add_metric(values, group.evicted_pages)
            hits.add_metric(values, group.hit_tokens)
        return used, cached, evicted, hits

    def _by_label(self, label: str, name: str, values: dict[str, int]) -> Metric:
        text = f"How often, by {label}."
        family = CounterMetricFamily(f"kvell:{name}", text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((self._model_name, key), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"kvell:{name}", text, labels=LABELS)
        family.add_metric((self._model_name,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"kvell:{name}", text, labels=LABELS)
        family.add_metric((self._model_name,), value)
        return family
