"""The instances' statistics as Prometheus metrics: vLLM's names, and pages by group."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, get_args

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

CHUNKS = "_chunks"
GAUGES = ("chunk_bytes", "stale_positions", "withheld_large_pages", "largest_step_chunks")


def chunks_by_state(memory: dict[str, int]) -> dict[str, int]:
    """Return the chunks of a shared pool by owner and state; empty if only KV uses the pool."""
    return {
        name.removesuffix(CHUNKS): count
        for name, count in memory.items()
        if name.endswith(CHUNKS) and name not in GAUGES
    }


def moves_by_kind(memory: dict[str, int]) -> dict[str, int]:
    return {n: c for n, c in memory.items() if n not in GAUGES and not n.endswith(CHUNKS)}


@dataclass(frozen=True)
class InstanceMemory:
    """The memory of one instance.

    :param now_bytes: memory of its processes; 0 without a process on this machine.
    """

    report: InstanceReport
    stats: Stats
    now_bytes: int = 0


def contract_of_all(parts: Sequence[Mapping[str, int]], *, shares_weights: bool = True) -> int:
    """Return the ``contract_bytes`` of several instances together.

    :param parts: memory contract of each instance.
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

    :param contracts: memory contracts by instance id.
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

    :param facts: facts by instance id.
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
    instances: Mapping[str, InstanceMemory],
    front_floor_bytes: int,
    front_work_bytes: int = 0,
    *,
    front_now_bytes: int = 0,
    shares_weights: bool = True,
) -> dict[str, Any]:
    """Return the body of ``/debug/memory``.

    :param instances: the instances that answered, by id.
    :param front_floor_bytes: size of this process before it served requests.
    :param front_work_bytes: its largest working set for texts and pictures.
    :param front_now_bytes: its size now.
    :param shares_weights: see :func:`contract_of_all`.
    :returns: ``contract_bytes`` and ``parts`` are sums over all processes, ``now_bytes`` has the
        front's memory and the instances', ``instances`` the body of each.  The body of a single
        instance is also merged into the top level.
    """
    pages = {name: _instance_page(instance) for name, instance in instances.items()}
    contracts = [instance.report.facts.memory for instance in instances.values()]
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


def _instance_page(instance: InstanceMemory) -> dict[str, Any]:
    stats = instance.stats
    return {
        "parts": dict(instance.report.facts.memory),
        "now_bytes": instance.now_bytes,
        "pool": {
            "large_page_bytes": stats.large_page_bytes,
            "large_pages": stats.large_pages,
            "empty_large_pages": stats.empty_large_pages,
            "chunk_bytes": stats.memory.get("chunk_bytes", 0),
            "chunks": chunks_by_state(stats.memory),
            "withheld_large_pages": stats.memory.get("withheld_large_pages", 0),
            "largest_step_chunks": stats.memory.get("largest_step_chunks", 0),
            "groups": [_group(group) for group in stats.groups],
        },
        "moves": moves_by_kind(stats.memory),
        "cpu_buffer": stats.buffer,
        "rungs": stats.rungs,
        "requests": {"running": stats.running, "waiting": stats.waiting},
    }


def _group(group: GroupStats) -> dict[str, Any]:
    return {
        "name": group.name,
        "page_bytes": group.page_bytes,
        "used_pages": group.used_pages,
        "cached_pages": group.cached_pages,
        "evicted_pages": group.evicted_pages,
    }


LABELS = ("model_name", "instance")
FRONT = "front"
"""The ``instance`` label of the front's own metrics."""
WAITING = "kvell:num_requests_waiting"
MEMORY = "kvell:process_memory_bytes"
MEMORY_TEXT = "Memory of a process; shared memory is divided among its users."
WHOLE = "contract_bytes"
"""The sum of a memory contract's parts."""
GROUP_GAUGES = {
    "used_pages": "Pages in use.",
    "cached_pages": "Cached pages.",
    "unwritten_pages": "Pages never written, in large pages in use.",
    "stranded_pages": "Pages cached or empty that no other group can get.",
    "page_bytes": "Bytes of a page.",
}
GROUP_COUNTERS = {
    "evicted_pages": "Pages evicted.",
    "checkpoint_pages": "State checkpoints written while a prompt is computed.",
}


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


class InstancesCollector(Collector):
    """The latest figures of each instance as metrics with the label ``instance``."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.instances: Mapping[str, InstanceFigures] = {}
        self.front_waiting = 0
        self.front_bytes = 0

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once, with the samples of all instances."""
        families: dict[str, Metric] = {}
        waiting = GaugeMetricFamily(WAITING, "Requests that wait.", labels=LABELS)
        waiting.add_metric((self._model_name, FRONT), self.front_waiting)
        families[waiting.name] = waiting
        memory = GaugeMetricFamily(MEMORY, MEMORY_TEXT, labels=LABELS)
        memory.add_metric((self._model_name, FRONT), self.front_bytes)
        families[memory.name] = memory
        for name, figures in self.instances.items():
            for family in _InstanceMetrics(self._model_name, name, figures).collect():
                if family.name in families:
                    families[family.name].samples.extend(family.samples)
                else:
                    families[family.name] = family
        yield from families.values()


class _InstanceMetrics:
    """The figures of one instance as metrics; a restart resets its counters."""

    def __init__(self, model_name: str, instance: str, figures: InstanceFigures) -> None:
        self._key = (model_name, instance)
        self.stats, self.report = figures.stats, figures.report
        self.restarts, self.process_bytes = figures.restarts, figures.process_bytes
        self.transfers = figures.transfers

    def collect(self) -> Iterator[Metric]:
        """Yield each metric that has a value."""
        up = float(self.stats is not None)
        yield self._gauge("instance_up", "Whether the instance answered.", up)
        yield self._counter("instance_restarts", "Restarts of the instance.", self.restarts)
        yield from self._of_transfers()
        if self.report is not None:
            yield from self._of_contract(self.report.facts.memory)
        if self.process_bytes:
            yield self._gauge(MEMORY.removeprefix("kvell:"), MEMORY_TEXT, self.process_bytes)
        if self.stats is None:
            return
        yield from self._gauges(self.stats)
        yield from self._counters(self.stats)
        yield from self._of_draft_tokens(self.stats)
        yield self._of_steps(self.stats)
        yield from self._of_groups(self.stats.groups)
        yield from self._of_sizes(self.stats)
        yield self._by_label(
            "ladder_rungs",
            "Times that memory was short, by the step that freed some.",
            "rung",
            self.stats.rungs,
        )
        yield from self._of_shared_pool(self.stats.memory)
        yield from self._of_cpu_buffer(self.stats.buffer)
        yield from self._of_sections(self.stats.sections)
        yield from self._of_team(self.stats.team)
        yield self._by_label("device_steps", "Steps on a GPU.", "how", self.stats.device_steps)

    def _of_transfers(self) -> Iterator[Metric]:
        """Yield the requests that arrived from other instances, and the pages that were copied."""
        totals = {kind: self.transfers.get(kind, NO_TRANSFER) for kind in get_args(TransferKind)}
        requests = {kind: each.requests for kind, each in totals.items()}
        text = "Requests handed over or moved to the instance, or whose cached pages it pulled."
        yield self._by_label("request_transfers", text, "kind", requests)
        sizes = {kind: each.size_bytes for kind, each in totals.items()}
        text = "Bytes of pages copied to the instance for these requests."
        yield self._by_label("request_transfer_bytes", text, "kind", sizes)

    def _gauges(self, stats: Stats) -> Iterator[Metric]:
        gauge = self._gauge
        yield gauge("num_requests_running", "Requests in the running batch.", stats.running)
        yield gauge("num_requests_waiting", "Requests that wait.", stats.waiting)
        yield gauge(
            "kv_cache_usage_perc", "Used part of the KV pool (1 is all).", stats.kv_cache_usage
        )
        yield gauge("large_pages", "Large pages of the pool.", stats.large_pages)
        yield gauge("large_page_bytes", "Bytes of a large page.", stats.large_page_bytes)
        yield gauge("empty_large_pages", "Unused large pages.", stats.empty_large_pages)
        yield gauge("protected_prefixes", "Protected shared prefixes.", stats.protected_prefixes)
        yield gauge("protected_tokens", "Tokens of protected prefixes.", stats.protected_tokens)

    def _counters(self, stats: Stats) -> Iterator[Metric]:
        counter, queries, hits = self._counter, stats.prefix_cache_queries, stats.prefix_cache_hits
        yield counter("steps", "Engine steps.", stats.step)
        yield counter("prefix_cache_queries", "Prompt tokens looked up.", queries)
        yield counter("prefix_cache_hits", "Prompt tokens found cached.", hits)
        yield counter("prompt_tokens_cached", "Prompt tokens found cached.", hits)
        yield self._by_label(
            "prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from.",
            "source",
            {"local_compute": queries - hits, "local_cache_hit": hits},
        )
        yield self._by_label(
            "prompt_tokens_cached_by_source",
            "Prompt tokens found cached, by what had them.",
            "source",
            _hits_by_place(hits, stats.buffer),
        )
        text = "Prompts of which a part was not found cached, by reason."
        yield self._by_label("prefix_cache_misses", text, "reason", stats.misses)
        yield counter("num_preemptions", "Preemptions.", stats.preemptions)

    def _of_draft_tokens(self, stats: Stats) -> Iterator[Metric]:
        counter, right = self._counter, stats.spec_decode_accepted_tokens
        yield counter(
            "spec_decode_num_drafts",
            "Steps of a request with draft tokens.",
            stats.spec_decode_drafts,
        )
        yield counter(
            "spec_decode_num_draft_tokens", "Draft tokens.", stats.spec_decode_draft_tokens
        )
        yield counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", right)
        places = enumerate(stats.spec_decode_accepted_by_position)
        yield self._by_label(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position after the newest token.",
            "position",
            {str(place): count for place, count in places},
        )

    def _of_steps(self, stats: Stats) -> Metric:
        family = HistogramMetricFamily(
            "kvell:iteration_tokens_total", "Tokens computed in a step.", labels=LABELS
        )
        bounds = [*(str(float(bound)) for bound in STEP_TOKENS_BUCKETS), "+Inf"]
        counts = stats.steps_by_size or (0,) * len(bounds)
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        family.add_metric(self._key, buckets, stats.step_tokens)
        return family

    def _of_groups(self, groups: tuple[GroupStats, ...]) -> Iterator[Metric]:
        for name, text in GROUP_GAUGES.items():
            values = {group.name: getattr(group, name) for group in groups}
            yield self._by_label(f"group_{name}", text, "group", values, GaugeMetricFamily)
        for name, text in GROUP_COUNTERS.items():
            values = {group.name: getattr(group, name) for group in groups}
            yield self._by_label(f"group_{name}", text, "group", values)
        hits = {group.name: group.hit_tokens for group in groups}
        text = "Prompt tokens found cached in the group."
        yield self._by_label("group_prefix_cache_hits", text, "group", hits)

    def _of_contract(self, promised: Mapping[str, int]) -> Iterator[Metric]:
        if WHOLE not in promised:
            return
        text = "Most memory that a process takes, by its contract."
        yield self._gauge("memory_contract_bytes", text, promised[WHOLE])
        parts = {n.removesuffix("_bytes"): size for n, size in promised.items() if n != WHOLE}
        text = "Parts of the memory contract."
        yield self._by_label("memory_contract_part_bytes", text, "part", parts, GaugeMetricFamily)

    def _of_shared_pool(self, memory: dict[str, int]) -> Iterator[Metric]:
        """Yield the owners of chunks that KV cache and activations share; no samples otherwise."""
        states = chunks_by_state(memory)
        moves = moves_by_kind(memory)
        text = "Chunks of the shared pool, by owner and state."
        yield self._by_label("memory_chunks", text, "state", states, GaugeMetricFamily)
        if "chunk_bytes" in memory:
            yield self._gauge("memory_chunk_bytes", "Bytes of a chunk.", memory["chunk_bytes"])
        text = "Chunks that changed owner or were mapped, by what happened."
        yield self._by_label("memory_chunk_moves", text, "move", moves)

    def _of_cpu_buffer(self, buffer: dict[str, int]) -> Iterator[Metric]:
        """Yield the content of the CPU buffer and the copied bytes; nothing without a buffer."""
        if not buffer:
            return
        used = buffer["used_large_pages"]
        states = {"used": used, "empty": buffer["large_pages"] - used}
        text = "Large pages of the CPU buffer, by state."
        yield self._by_label("cpu_buffer_large_pages", text, "state", states, GaugeMetricFamily)
        yield self._gauge("cpu_buffer_requests", "Requests in the buffer.", buffer["holders"])
        moved = {"out": buffer["out_bytes"], "in": buffer["in_bytes"]}
        yield self._by_label("cpu_buffer_bytes", "Bytes copied, by direction.", "way", moved)
        if "cached_pages" in buffer:
            text = "Pages of cached prefixes in the buffer."
            yield self._gauge("cpu_buffer_cached_pages", text, buffer["cached_pages"])
        if "parked" in buffer:
            text = "Requests in the buffer that wait while prompts run first."
            yield self._gauge("cpu_buffer_parked", text, buffer["parked"])
            text = "Large pages that prompts may use to run first."
            yield self._gauge("cpu_buffer_logical", text, buffer["logical_large_pages"])

    def _of_sections(self, sections: dict[str, int]) -> Iterator[Metric]:
        """Yield the sections that instances lend each other."""
        now = {name: sections.get(name, 0) for name in ("lent", "borrowed")}
        text = "Remote sections of 512 tokens, by owner."
        yield self._by_label("kv_sections", text, "side", now, GaugeMetricFamily)
        ended = {name: sections.get(name, 0) for name in ("returned", "replaced", "lost")}
        text = "Recalled sections, by whether they were copied back in time."
        yield self._by_label("kv_sections_recalled", text, "end", ended)
        text = "Sections that a request shares with another request of the same text."
        yield self._counter("kv_sections_shared", text, sections.get("shared", 0))
        text = "Loans of a section that the instance has taken."
        yield self._counter("kv_section_loans", text, sections.get("loans", 0))
        text = "Bytes copied to creditors for these loans."
        yield self._counter("kv_section_loan_bytes", text, sections.get("loaned_bytes", 0))

    def _of_team(self, team: dict[str, float]) -> Iterator[Metric]:
        """Yield the share of processors that steps got; nothing without a compiled pass."""
        if not team:
            return
        yield self._gauge("step_threads", "Threads of the last step.", team["threads"])
        text = "Whether the last step shared its processors with other programs."
        yield self._gauge("step_processors_shared", text, team["shared"])
        text = "Seconds of all threads in steps."
        yield self._counter("step_thread_seconds", text, team["thread_seconds"])
        text = "Seconds in which threads of steps could have run and other programs did."
        yield self._counter("step_thread_lost_seconds", text, team["lost_seconds"])

    def _of_sizes(self, stats: Stats) -> Iterator[Metric]:
        """Yield constant sizes as labels; vLLM's ``block_size`` is the first group's."""
        first = stats.groups[0] if stats.groups else None
        facts = {
            "block_size": first.page_tokens if first else 0,
            "num_gpu_blocks": first.most_pages if first else 0,
            "large_page_bytes": stats.large_page_bytes,
            "large_pages": stats.large_pages,
            "incarnation": stats.incarnation,
        }
        if self.report is not None:
            facts["max_model_len"] = self.report.facts.max_model_len
            facts["kv_pool_bytes"] = self.report.facts.kv_pool_bytes
        yield self._info("cache_config_info", "Sizes of the KV pool.", [facts])
        names = ("page_tokens", "page_bytes", "most_pages")
        groups = [
            {"group": group.name, **{name: getattr(group, name) for name in names}}
            for group in stats.groups
        ]
        yield self._info("group_info", "Sizes of a group's pages.", groups)

    def _info(self, name: str, text: str, rows: Sequence[Mapping[str, int | str]]) -> Metric:
        keys = tuple(rows[0]) if rows else ()
        family = GaugeMetricFamily(f"kvell:{name}", text, labels=(*LABELS, *keys))
        for row in rows:
            family.add_metric((*self._key, *(str(row[key]) for key in keys)), 1)
        return family

    def _by_label(
        self,
        name: str,
        text: str,
        label: str,
        values: Mapping[str, int],
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily,
    ) -> Metric:
        family = kind(f"kvell:{name}", text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._key, key), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"kvell:{name}", text, labels=LABELS)
        family.add_metric(self._key, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"kvell:{name}", text, labels=LABELS)
        family.add_metric(self._key, value)
        return family


def _hits_by_place(hits: int, buffer: Mapping[str, int]) -> dict[str, int]:
    """Return the cached tokens found in the pool, and in the CPU buffer if there is one."""
    if "cache_hit_tokens" not in buffer:
        return {"device": hits}
    buffered = min(hits, buffer["cache_hit_tokens"])
    return {"device": hits - buffered, "cpu_buffer": buffered}
