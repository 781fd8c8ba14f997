"""The front's measurements of requests, as Prometheus metrics under vLLM's names.

Names, meaning and bucket bounds are those of vLLM 0.32 (``vllm/v1/metrics/loggers.py``,
``buckets.py``), so that its dashboards work with another prefix; smaller bounds are added
where a small model on a CPU or one step of a large GPU would fall into the first bucket.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvell.engine.protocol.statistics import Stats
from kvell.errors import Bound, TryLater
from kvell.front.front import Front
from kvell.front.request_log import EndedRequest
from kvell.server.metrics.instance_metrics import CATALOGUE, METRICS, InstancesCollector

ANSWER_SECONDS = 2.0
"""Statistics of instances that do not answer within this time are left out."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name",)
MOST_NOTED = 4096
"""The most pieces of output that are noted before they are counted.

Work per token is kept small, since its data has left the processor's caches by the next token.
"""
MOST_LATEST = 64
"""The most latencies of each kind that are kept until they are taken."""
HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    name: (CATALOGUE.buckets[bounds], text) for name, (bounds, text) in CATALOGUE.histograms.items()
}
"""Upper bounds of the buckets, and texts, by name."""
REASONS = ("stop", "length", "cancelled", "refused", "error")
ANSWERED = ("stop", "length")
COUNTED_PATHS = frozenset(
    (
        "/v1/chat/completions /v1/completions /v1/embeddings /v1/responses /v1/messages "
        "/v1/messages/count_tokens /score /v1/score /rerank /v1/rerank /v2/rerank"
    ).split()
)
Awaited = Literal["idle", "body", "answer"]
"""The next event of a connection: a request, its body, or an answer."""
OTHER_PATHS = "other"
"""The label of all other paths: clients choose paths, and each would get its own series."""


class _BeforeOthers(Collector):
    """A collector that is registered first, to call a function before metrics are read."""

    def __init__(self, first: Callable[[], None]) -> None:
        self._first = first

    def collect(self) -> Iterator[Metric]:
        self._first()
        return iter(())

    def describe(self) -> Iterator[Metric]:
        return iter(())


class ServerMetrics:
    """The metrics of the front's requests and of the instances.

    They are the front's ``RequestObserver``.  Times are seconds from the client's view, including
    queueing.  Histograms of whole requests count answered requests only; ``request_success``
    counts all by their reason.
    """

    def __init__(self, model_name: str) -> None:
        self._noted: list[tuple[float, int]] = []
        self._latest_first: deque[float] = deque(maxlen=MOST_LATEST)
        self._latest_next: deque[float] = deque(maxlen=MOST_LATEST)
        self.registry = CollectorRegistry()
        self.registry.register(_BeforeOthers(self._count_noted))
        self.instances = InstancesCollector(model_name)
        self.registry.register(self.instances)
        ProcessCollector(registry=self.registry)
        self.model_name = model_name
        self._prompt_tokens = self._family("prompt_tokens").labels(model_name)
        self._output_tokens = self._family("generation_tokens").labels(model_name)
        self._histograms = {name: self._histogram(name) for name in HISTOGRAMS}
        self._ends = self._family("request_success")
        self._rejected = self._family("admission_rejections")
        self._idle_waits = self._family("idle_waits").labels(model_name)
        self._retries = self._family("request_retries").labels(model_name)
        self._answers = self._family("http_responses")
        facts = METRICS["http_connections"]
        self._connections = Gauge(
            "kvell:http_connections", facts.text, (*LABELS, *facts.labels), registry=self.registry
        )
        for reason in REASONS:
            self._ends.labels(model_name, reason)
        for bound in get_args(Bound):
            self._rejected.labels(model_name, bound)

    def first_tokens(self, seconds: float, count: int, prompt_tokens: int) -> None:
        """Count a request's first ``count`` tokens, ``seconds`` after its arrival."""
        self._prompt_tokens.inc(prompt_tokens)
        self._output_tokens.inc(count)
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        self._latest_first.append(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        """Note ``count`` further tokens, ``seconds`` after the previous ones."""
        self._noted.append((seconds, count))
        if len(self._noted) >= MOST_NOTED:
            self._count_noted()

    def on_ended(self, request: EndedRequest) -> None:
        self._ends.labels(self.model_name, request.finished.reason).inc()
        self._retries.inc(request.finished.attempt)
        if request.finished.embedding:  # without a first token, which counts other prompts
            self._prompt_tokens.inc(request.finished.prompt_tokens)
        if request.finished.reason in ANSWERED:
            for name, value in _of_answered(request).items():
                if value is not None:
                    self._histograms[name].observe(value)

    def on_rejected(self, bound: Bound) -> None:
        self._rejected.labels(self.model_name, bound).inc()

    def waits_idle(self) -> None:
        self._idle_waits.inc()

    def answered_over_http(self, path: str, status: int) -> None:
        """Count an HTTP answer, or a closed connection (499), by path and status."""
        shown = path if path in COUNTED_PATHS else OTHER_PATHS
        self._answers.labels(self.model_name, shown, str(status)).inc()

    def watch_connections(self, count: Callable[[Awaited], int]) -> None:
        """Export the number of open connections."""
        for state in get_args(Awaited):
            self._connections.labels(self.model_name, state).set_function(partial(count, state))

    def on_prompt(self, choices: int) -> None:
        self._histograms["request_params_n"].observe(choices)

    def on_answered(self, longest_tokens: int) -> None:
        """Count a prompt whose answers have all ended, with the tokens of the longest."""
        self._histograms["request_max_num_generation_tokens"].observe(longest_tokens)

    def token_totals(self) -> tuple[int, int]:
        self._count_noted()
        return _value(self._prompt_tokens), _value(self._output_tokens)

    def take_latencies(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return the latest times to first token and per further token, each only once."""
        self._count_noted()
        latencies = tuple(self._latest_first), tuple(self._latest_next)
        self._latest_first.clear()
        self._latest_next.clear()
        return latencies

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _count_noted(self) -> None:
        noted, self._noted = self._noted, []
        for seconds, count in noted:
            self._output_tokens.inc(count)
            self._histograms["inter_token_latency_seconds"].observe(seconds)
            self._latest_next.append(seconds / count)
            for _ in range(count):
                self._histograms["time_per_output_token_seconds"].observe(seconds / count)

    def _family(self, name: str) -> Counter:
        facts = METRICS[name]
        labels = (*LABELS, *facts.labels)
        return Counter(f"kvell:{name}", facts.text, labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        buckets, text = HISTOGRAMS[name]
        family = Histogram(f"kvell:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return family.labels(self.model_name)


def _value(counter: Counter) -> int:
    return round(next(iter(counter.collect())).samples[0].value)


def _of_answered(request: EndedRequest) -> dict[str, float | None]:
    """Return a request's values for the histograms of whole requests; None if it has no value."""
    finished, tokens = request.finished, request.output_tokens
    per_token = finished.decode_seconds / (tokens - 1) if tokens > 1 else None
    return {
        "e2e_request_latency_seconds": request.seconds,
        "request_queue_time_seconds": request.line_seconds + finished.queue_seconds,
        "request_prefill_time_seconds": finished.prefill_seconds,
        "request_decode_time_seconds": finished.decode_seconds,
        "request_inference_time_seconds": finished.prefill_seconds + finished.decode_seconds,
        "request_time_per_output_token_seconds": per_token,
        "request_prompt_tokens": finished.prompt_tokens,
        "request_generation_tokens": tokens,
        "request_prefill_kv_computed_tokens": finished.prompt_tokens - finished.cached_tokens,
        "request_params_max_tokens": request.max_tokens,
        "request_num_preemptions": finished.preemptions,
    }


async def answered_stats(front: Front, *, with_audit: bool = False) -> dict[str, Stats]:
    """Return the statistics of the instances that answer within ``ANSWER_SECONDS``."""
    try:
        return await front.stats(ANSWER_SECONDS, with_audit=with_audit)
    except TryLater:
        return {}
