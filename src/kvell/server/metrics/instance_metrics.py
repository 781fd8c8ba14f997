"""The instances' statistics as Prometheus metrics: vLLM's names, and pages by group."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, get_args

from msgspec import Struct
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvell.cost.prices import USUAL_PRICES, describe_prices
from kvell.engine.protocol.statistics import GroupStats, InstanceFacts, InstanceReport, Stats
from kvell.engine.requests.counting import STEP_TOKENS_BUCKETS
from kvell.engine.setup.contract import size
from kvell.front.routes import NO_TRANSFER, TransferKind, TransferTotals
from kvell.wire.decoding import decode_packaged

CHUNKS = "_chunks"
SIZES = ("chunk_bytes", "stale_positions", "withheld_large_pages", "largest_step_chunks")
POOL_FIELDS = ("large_page_bytes", "large_pages", "empty_large_pages")
GROUP_FIELDS = ("name", "page_bytes", "used_pages", "cached_pages", "evicted_pages")


def chunks_by_state(memory: dict[str, int]) -> dict[str, int]:
    """Return the chunks of a shared pool by owner and state; empty if only KV uses the pool."""
    return {
        name.removesuffix(CHUNKS): count
        for name, count in memory.items()
        if name.endswith(CHUNKS) and name not in SIZES
    }


def moves_by_kind(memory: dict[str, int]) -> dict[str, int]:
    return {n: c for n, c in memory.items() if n not in SIZES and not n.endswith(CHUNKS)}


@dataclass(frozen=True)
class InstanceFigures:
    """The figures of one instance; ``stats`` is None if it did not answer.

    :param process_bytes: memory of its process now; 0 if unknown.
    :param transfers: transfers of this front's requests to the instance so far, by kind.
    """

    stats: Stats | None = None
    report: InstanceReport | None = None
    restarts: int = 0
    process_bytes: int = 0
    transfers: Mapping[TransferKind, TransferTotals] = field(default_factory=dict)


def contract_of_all(parts: Sequence[Mapping[str, int]], *, shares_weights: bool = True) -> int:
    """Return the ``contract_bytes`` of several instances together.

    :param shares_weights: whether the instances share their weights in memory, as on one host.
    """
    promised_bytes = sum(contract.get("contract_bytes", 0) for contract in parts)
    if not shares_weights:
        return promised_bytes
    weights = [contract.get("weights_bytes", 0) for contract in parts]
    return promised_bytes - sum(weights) + max(weights, default=0)


def contract_lines(
    contracts: Mapping[str, Mapping[str, int]],
    front_bytes: int,
    *,
    shares_weights: bool = True,
) -> list[str]:
    """Return the memory contract of several instances: a line per process and one for the sum.

    :param front_bytes: size of this process at its start plus its largest working set.
    :param shares_weights: see :func:`contract_of_all`.
    """
    rows = {name: parts.get("contract_bytes", 0) for name, parts in contracts.items()}
    parts = list(contracts.values())
    whole_bytes = contract_of_all(parts, shares_weights=shares_weights) + front_bytes
    shared_bytes = sum(rows.values()) + front_bytes - whole_bytes
    return [
        "memory of all processes, at most",
        f"  {'front':<18}  {size(front_bytes)}",
        *(f"  {name:<18}  {size(promised_bytes)}" for name, promised_bytes in rows.items()),
        *([f"  {'shared weights':<18} -{size(shared_bytes)}"] if shared_bytes else []),
        f"  {'all processes':<18}  {size(whole_bytes)}",
    ]


def price_lines(facts: Mapping[str, InstanceFacts]) -> list[str]:
    """Return a line for each kind of prices that instances have, with their names if they differ.

    :returns: nothing for a single instance with the default prices, which nothing uses.
    """
    names: dict[str, list[str]] = {}
    for name, each in facts.items():
        names.setdefault(describe_prices(each.prices, each.prices_origin), []).append(name)
    if len(facts) < 2 and all(each.prices == USUAL_PRICES for each in facts.values()):
        return []
    return [
        f"  {'prices':<18}  {text}" + (f" ({', '.join(having)})" if len(names) > 1 else "")
        for text, having in names.items()
    ]


def memory_page(
    instances: Mapping[str, InstanceFigures],
    front_floor_bytes: int,
    front_work_bytes: int = 0,
    *,
    front_now_bytes: int = 0,
    shares_weights: bool = True,
) -> dict[str, Any]:
    """Return the body of ``/debug/memory``.

    :param instances: figures with a report and statistics.
    :param front_floor_bytes: size of this process before it served requests.
    :param front_work_bytes: its largest working set for texts and pictures.
    :param shares_weights: see :func:`contract_of_all`.
    :returns: ``contract_bytes`` and ``parts`` are sums over all processes, ``now_bytes`` has the
        front's memory and the instances', ``instances`` the body of each.  The body of a single
        instance is also merged into the top level.
    """
    pages = {name: _instance_page(each) for name, each in instances.items()}
    contracts = [page["parts"] for page in pages.values()]
    names = {name for contract in contracts for name in contract}
    parts = {name: sum(contract.get(name, 0) for contract in contracts) for name in sorted(names)}
    alone = next(iter(pages.values())) if len(pages) == 1 else {}
    return {
        **alone,
        "contract_bytes": contract_of_all(contracts, shares_weights=shares_weights)
        + front_floor_bytes
        + front_work_bytes,
        "parts": {
            **parts,
            "front_floor_bytes": front_floor_bytes,
            "front_work_bytes": front_work_bytes,
        },
        "now_bytes": {
            "front": front_now_bytes,
            "instance": sum(page["now_bytes"] for page in pages.values()),
        },
        "instances": pages,
    }


def _instance_page(figures: InstanceFigures) -> dict[str, Any]:
    report, stats = figures.report, figures.stats
    assert report is not None, "an instance that answers has reported its facts"
    assert stats is not None
    return {
        "parts": dict(report.facts.memory),
        "now_bytes": figures.process_bytes,
        "pool": {
            **{name: getattr(stats, name) for name in POOL_FIELDS},
            "chunk_bytes": stats.memory.get("chunk_bytes", 0),
            "chunks": chunks_by_state(stats.memory),
            "withheld_large_pages": stats.memory.get("withheld_large_pages", 0),
            "largest_step_chunks": stats.memory.get("largest_step_chunks", 0),
            "groups": [
                {name: getattr(group, name) for name in GROUP_FIELDS} for group in stats.groups
            ],
        },
        "moves": moves_by_kind(stats.memory),
        "cpu_buffer": stats.buffer,
        "rungs": stats.rungs,
        "requests": {"running": stats.running, "waiting": stats.waiting},
    }


LABELS = ("model_name", "instance")
FRONT = "front"
"""The ``instance`` label of the front's own metrics."""
WHOLE = "contract_bytes"
"""The sum of a memory contract's parts."""


class MetricFacts(Struct, frozen=True):
    """An entry of ``metrics.json``.

    :param labels: names of labels besides those of all metrics.
    :param field: the field of :class:`Stats`, or of a group's statistics with the label ``group``;
        ``memory.x`` is a key of the field ``memory``.  "" if the value has no field.
    """

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    field: str = ""


class Catalogue(Struct, frozen=True):
    """The names, texts and bucket bounds of all metrics.

    :param histograms: bounds and text of each histogram of requests.
    """

    buckets: dict[str, tuple[float, ...]]
    histograms: dict[str, tuple[str, str]]
    metrics: dict[str, MetricFacts]


CATALOGUE = decode_packaged(Catalogue, "kvell.server.metrics", "metrics.json")
METRICS = CATALOGUE.metrics


class InstancesCollector(Collector):
    """The latest figures of each instance as metrics with the label ``instance``."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.instances: Mapping[str, InstanceFigures] = {}
        self.front_waiting = 0
        self.front_bytes = 0

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once, with the samples of all instances."""
        metrics = _Metrics(self._model_name)
        metrics.add("num_requests_waiting", self.front_waiting)
        metrics.add("process_memory_bytes", self.front_bytes)
        for metrics.instance, figures in self.instances.items():
            metrics.add_figures(figures)
        yield from metrics.families.values()


class _Metrics:
    """Metrics of several instances; a restart resets an instance's counters.

    :ivar instance: the label of samples that are added.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.instance = FRONT
        self.families: dict[str, Metric] = {}

    def add(self, name: str, values: float | Mapping[str, float]) -> None:
        """Add a metric's value, or its values by its label."""
        facts = METRICS[name]
        make = GaugeMetricFamily if facts.kind == "gauge" else CounterMetricFamily
        family = make(f"kvell:{name}", facts.text, labels=(*LABELS, *facts.labels))
        by_label = values if isinstance(values, Mapping) else {"": values}
        for key, value in by_label.items():
            family.add_metric((*self._key(), key) if facts.labels else self._key(), value)
        self._extend(family)

    def add_figures(self, figures: InstanceFigures) -> None:
        """Add each metric that has a value."""
        stats = figures.stats
        self.add("instance_up", float(stats is not None))
        self.add("instance_restarts", figures.restarts)
        self._add_transfers(figures.transfers)
        if figures.report is not None:
            self._add_contract(figures.report.facts.memory)
        if figures.process_bytes:
            self.add("process_memory_bytes", figures.process_bytes)
        if stats is None:
            return
        for name, facts in METRICS.items():
            is_plain = facts.field and not facts.labels
            if is_plain and (value := _value_at(stats, facts.field)) is not None:
                self.add(name, value)
        self._add_tokens(stats)
        self._add_steps(stats)
        self._add_groups(stats.groups)
        self._add_sizes(stats, figures.report)
        self.add("ladder_rungs", stats.rungs)
        self.add("memory_chunks", chunks_by_state(stats.memory))
        self.add("memory_chunk_moves", moves_by_kind(stats.memory))
        self._add_buffer(stats.buffer)
        self._add_sections(stats.sections)
        self.add("device_steps", stats.device_steps)

    def _add_transfers(self, transfers: Mapping[TransferKind, TransferTotals]) -> None:
        """Add the requests that arrived from other instances, and the pages that were copied."""
        totals = {kind: transfers.get(kind, NO_TRANSFER) for kind in get_args(TransferKind)}
        requests = {kind: each.requests for kind, each in totals.items()}
        self.add("request_transfers", requests)
        sizes = {kind: each.size_bytes for kind, each in totals.items()}
        self.add("request_transfer_bytes", sizes)

    def _add_contract(self, promised: Mapping[str, int]) -> None:
        if WHOLE not in promised:
            return
        self.add("memory_contract_bytes", promised[WHOLE])
        parts = {n.removesuffix("_bytes"): size for n, size in promised.items() if n != WHOLE}
        self.add("memory_contract_part_bytes", parts)

    def _add_tokens(self, stats: Stats) -> None:
        queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
        sources = {"local_compute": queries - hits, "local_cache_hit": hits}
        self.add("prompt_tokens_by_source", sources)
        places = _hits_by_place(hits, stats.buffer)
        self.add("prompt_tokens_cached_by_source", places)
        self.add("prefix_cache_misses", stats.misses)
        accepted = {str(place): n for place, n in enumerate(stats.spec_decode_accepted_by_position)}
        self.add("spec_decode_num_accepted_tokens_per_pos", accepted)

    def _add_steps(self, stats: Stats) -> None:
        name = "iteration_tokens_total"
        family = HistogramMetricFamily(f"kvell:{name}", METRICS[name].text, labels=LABELS)
        bounds = [*(str(float(bound)) for bound in STEP_TOKENS_BUCKETS), "+Inf"]
        counts = stats.steps_by_size or (0,) * len(bounds)
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        family.add_metric(self._key(), buckets, stats.step_tokens)
        self._extend(family)

    def _add_groups(self, groups: tuple[GroupStats, ...]) -> None:
        for name, facts in METRICS.items():
            if facts.labels == ("group",):
                self.add(name, {group.name: getattr(group, facts.field) for group in groups})

    def _add_sizes(self, stats: Stats, report: InstanceReport | None) -> None:
        """Add constant sizes as labels; vLLM's ``block_size`` is the first group's."""
        first = stats.groups[0] if stats.groups else None
        facts = {
            "block_size": first.page_tokens if first else 0,
            "num_gpu_blocks": first.most_pages if first else 0,
            "large_page_bytes": stats.large_page_bytes,
            "large_pages": stats.large_pages,
            "incarnation": stats.incarnation,
        }
        if report is not None:
            facts["max_model_len"] = report.facts.max_model_len
            facts["kv_pool_bytes"] = report.facts.kv_pool_bytes
        self._add_info("cache_config_info", [facts])
        names = ("page_tokens", "page_bytes", "most_pages")
        groups = [
            {"group": group.name, **{name: getattr(group, name) for name in names}}
            for group in stats.groups
        ]
        self._add_info("group_info", groups)

    def _add_buffer(self, buffer: dict[str, int]) -> None:
        if not buffer:
            return
        used = buffer["used_large_pages"]
        states = {"used": used, "empty": buffer["large_pages"] - used}
        self.add("cpu_buffer_large_pages", states)
        moved = {"out": buffer["out_bytes"], "in": buffer["in_bytes"]}
        self.add("cpu_buffer_bytes", moved)

    def _add_sections(self, sections: dict[str, int]) -> None:
        now = {name: sections.get(name, 0) for name in ("lent", "borrowed")}
        self.add("kv_sections", now)
        ended = {name: sections.get(name, 0) for name in ("returned", "replaced", "lost")}
        self.add("kv_sections_recalled", ended)

    def _add_info(self, name: str, rows: Sequence[Mapping[str, int | str]]) -> None:
        keys = tuple(rows[0]) if rows else ()
        family = GaugeMetricFamily(f"kvell:{name}", METRICS[name].text, labels=(*LABELS, *keys))
        for row in rows:
            family.add_metric((*self._key(), *(str(row[key]) for key in keys)), 1)
        self._extend(family)

    def _extend(self, family: Metric) -> None:
        earlier = self.families.setdefault(family.name, family)
        if earlier is not family:
            earlier.samples.extend(family.samples)

    def _key(self) -> tuple[str, str]:
        return self._model_name, self.instance


def _value_at(stats: Stats, path: str) -> float | None:
    """Return a field, or the value of a key in it; None if the field has no such key."""
    name, _, key = path.partition(".")
    value = getattr(stats, name)
    number: float | None = value.get(key, 0 if name == "sections" else None) if key else value
    return number


def _hits_by_place(hits: int, buffer: Mapping[str, int]) -> dict[str, int]:
    """Return the cached tokens found in the pool, and in the CPU buffer if there is one."""
    if "cache_hit_tokens" not in buffer:
        return {"device": hits}
    buffered = min(hits, buffer["cache_hit_tokens"])
    return {"device": hits - buffered, "cpu_buffer": buffered}
