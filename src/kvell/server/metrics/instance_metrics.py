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
SIZES = ("chunk_bytes", "stale_positions", "withheld_large_pages", "largest_step_chunks")
GROUP_FIELDS = ("name", "page_bytes", "used_pages", "cached_pages", "evicted_pages")
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily


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
class InstanceMemory:
    """The memory of one instance.

    :param now_bytes: memory of its processes; 0 without a process on this machine.
    """

    report: InstanceReport
    stats: Stats
    now_bytes: int = 0


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
    instances: Mapping[str, InstanceMemory],
    front_floor_bytes: int,
    front_work_bytes: int = 0,
    *,
    front_now_bytes: int = 0,
    shares_weights: bool = True,
) -> dict[str, Any]:
    """Return the body of ``/debug/memory``.

    :param front_floor_bytes: size of this process before it served requests.
    :param front_work_bytes: its largest working set for texts and pictures.
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
GAUGES = {
    "num_requests_running": ("running", "Requests in the running batch."),
    "num_requests_waiting": ("waiting", "Requests that wait."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Used part of the KV pool (1 is all)."),
    "large_pages": ("large_pages", "Large pages of the pool."),
    "large_page_bytes": ("large_page_bytes", "Bytes of a large page."),
    "empty_large_pages": ("empty_large_pages", "Unused large pages."),
    "protected_prefixes": ("protected_prefixes", "Protected shared prefixes."),
    "protected_tokens": ("protected_tokens", "Tokens of protected prefixes."),
    "memory_chunk_bytes": ("memory.chunk_bytes", "Bytes of a chunk."),
    "cpu_buffer_requests": ("buffer.holders", "Requests in the buffer."),
    "cpu_buffer_cached_pages": ("buffer.cached_pages", "Pages of cached prefixes in the buffer."),
    "cpu_buffer_parked": (
        "buffer.parked",
        "Requests in the buffer that wait while prompts run first.",
    ),
    "cpu_buffer_logical": (
        "buffer.logical_large_pages",
        "Large pages that prompts may use to run first.",
    ),
    "step_threads": ("team.threads", "Threads of the last step."),
    "step_processors_shared": (
        "team.shared",
        "Whether the last step shared its processors with other programs.",
    ),
}
"""Fields of :class:`Stats` and texts by name; ``memory.x`` is a key of the field ``memory``."""
COUNTERS = {
    "steps": ("step", "Engine steps."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found cached."),
    "prompt_tokens_cached": ("prefix_cache_hits", "Prompt tokens found cached."),
    "num_preemptions": ("preemptions", "Preemptions."),
    "spec_decode_num_drafts": ("spec_decode_drafts", "Steps of a request with draft tokens."),
    "spec_decode_num_draft_tokens": ("spec_decode_draft_tokens", "Draft tokens."),
    "spec_decode_num_accepted_tokens": ("spec_decode_accepted_tokens", "Draft tokens accepted."),
    "step_thread_seconds": ("team.thread_seconds", "Seconds of all threads in steps."),
    "step_thread_lost_seconds": (
        "team.lost_seconds",
        "Seconds in which threads of steps could have run and other programs did.",
    ),
    "kv_sections_shared": (
        "sections.shared",
        "Sections that a request shares with another request of the same text.",
    ),
    "kv_section_loans": ("sections.loans", "Loans of a section that the instance has taken."),
    "kv_section_loan_bytes": (
        "sections.loaned_bytes",
        "Bytes copied to creditors for these loans.",
    ),
}
GROUP_GAUGES = {
    "used_pages": ("used_pages", "Pages in use."),
    "cached_pages": ("cached_pages", "Cached pages."),
    "unwritten_pages": ("unwritten_pages", "Pages never written, in large pages in use."),
    "stranded_pages": ("stranded_pages", "Pages cached or empty that no other group can get."),
    "page_bytes": ("page_bytes", "Bytes of a page."),
}
GROUP_COUNTERS = {
    "evicted_pages": ("evicted_pages", "Pages evicted."),
    "checkpoint_pages": (
        "checkpoint_pages",
        "State checkpoints written while a prompt is computed.",
    ),
    "prefix_cache_hits": ("hit_tokens", "Prompt tokens found cached in the group."),
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
        metrics = _Metrics(self._model_name)
        _, text = GAUGES["num_requests_waiting"]
        metrics.add(GAUGE, "num_requests_waiting", text, self.front_waiting)
        metrics.add_process(self.front_bytes)
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

    def add(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        values: float | Mapping[str, float],
        label: str = "",
    ) -> None:
        family = kind(f"kvell:{name}", text, labels=(*LABELS, label) if label else LABELS)
        by_label = values if isinstance(values, Mapping) else {"": values}
        for key, value in by_label.items():
            family.add_metric((*self._key(), key) if label else self._key(), value)
        self._extend(family)

    def add_process(self, size_bytes: int) -> None:
        text = "Memory of a process; shared memory is divided among its users."
        self.add(GAUGE, "process_memory_bytes", text, size_bytes)

    def add_figures(self, figures: InstanceFigures) -> None:
        """Add each metric that has a value."""
        stats = figures.stats
        self.add(GAUGE, "instance_up", "Whether the instance answered.", float(stats is not None))
        self.add(COUNTER, "instance_restarts", "Restarts of the instance.", figures.restarts)
        self._add_transfers(figures.transfers)
        if figures.report is not None:
            self._add_contract(figures.report.facts.memory)
        if figures.process_bytes:
            self.add_process(figures.process_bytes)
        if stats is None:
            return
        for kind, numbers in ((GAUGE, GAUGES), (COUNTER, COUNTERS)):
            for name, (path, text) in numbers.items():
                if (value := _value_at(stats, path)) is not None:
                    self.add(kind, name, text, value)
        self._add_tokens(stats)
        self._add_steps(stats)
        self._add_groups(stats.groups)
        self._add_sizes(stats, figures.report)
        text = "Times that memory was short, by the step that freed some."
        self.add(COUNTER, "ladder_rungs", text, stats.rungs, "rung")
        self._add_chunks(stats.memory)
        self._add_buffer(stats.buffer)
        self._add_sections(stats.sections)
        self.add(COUNTER, "device_steps", "Steps on a GPU.", stats.device_steps, "how")

    def _add_transfers(self, transfers: Mapping[TransferKind, TransferTotals]) -> None:
        """Add the requests that arrived from other instances, and the pages that were copied."""
        totals = {kind: transfers.get(kind, NO_TRANSFER) for kind in get_args(TransferKind)}
        requests = {kind: each.requests for kind, each in totals.items()}
        text = "Requests handed over or moved to the instance, or whose cached pages it pulled."
        self.add(COUNTER, "request_transfers", text, requests, "kind")
        sizes = {kind: each.size_bytes for kind, each in totals.items()}
        text = "Bytes of pages copied to the instance for these requests."
        self.add(COUNTER, "request_transfer_bytes", text, sizes, "kind")

    def _add_contract(self, promised: Mapping[str, int]) -> None:
        if WHOLE not in promised:
            return
        text = "Most memory that a process takes, by its contract."
        self.add(GAUGE, "memory_contract_bytes", text, promised[WHOLE])
        parts = {n.removesuffix("_bytes"): size for n, size in promised.items() if n != WHOLE}
        self.add(
            GAUGE, "memory_contract_part_bytes", "Parts of the memory contract.", parts, "part"
        )

    def _add_tokens(self, stats: Stats) -> None:
        queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
        text = "Prompt tokens by where their keys and values came from."
        sources = {"local_compute": queries - hits, "local_cache_hit": hits}
        self.add(COUNTER, "prompt_tokens_by_source", text, sources, "source")
        text = "Prompt tokens found cached, by what had them."
        places = _hits_by_place(hits, stats.buffer)
        self.add(COUNTER, "prompt_tokens_cached_by_source", text, places, "source")
        text = "Prompts of which a part was not found cached, by reason."
        self.add(COUNTER, "prefix_cache_misses", text, stats.misses, "reason")
        accepted = {str(place): n for place, n in enumerate(stats.spec_decode_accepted_by_position)}
        text = "Draft tokens accepted, by their position after the newest token."
        self.add(COUNTER, "spec_decode_num_accepted_tokens_per_pos", text, accepted, "position")

    def _add_steps(self, stats: Stats) -> None:
        name = "kvell:iteration_tokens_total"
        family = HistogramMetricFamily(name, "Tokens computed in a step.", labels=LABELS)
        bounds = [*(str(float(bound)) for bound in STEP_TOKENS_BUCKETS), "+Inf"]
        counts = stats.steps_by_size or (0,) * len(bounds)
        buckets = list(zip(bounds, accumulate(counts), strict=True))
        family.add_metric(self._key(), buckets, stats.step_tokens)
        self._extend(family)

    def _add_groups(self, groups: tuple[GroupStats, ...]) -> None:
        for kind, numbers in ((GAUGE, GROUP_GAUGES), (COUNTER, GROUP_COUNTERS)):
            for name, (path, text) in numbers.items():
                values = {group.name: getattr(group, path) for group in groups}
                self.add(kind, f"group_{name}", text, values, "group")

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
        self._add_info("cache_config_info", "Sizes of the KV pool.", [facts])
        names = ("page_tokens", "page_bytes", "most_pages")
        groups = [
            {"group": group.name, **{name: getattr(group, name) for name in names}}
            for group in stats.groups
        ]
        self._add_info("group_info", "Sizes of a group's pages.", groups)

    def _add_chunks(self, memory: dict[str, int]) -> None:
        """Add the owners of chunks that KV cache and activations share; no samples otherwise."""
        text = "Chunks of the shared pool, by owner and state."
        self.add(GAUGE, "memory_chunks", text, chunks_by_state(memory), "state")
        text = "Chunks that changed owner or were mapped, by what happened."
        self.add(COUNTER, "memory_chunk_moves", text, moves_by_kind(memory), "move")

    def _add_buffer(self, buffer: dict[str, int]) -> None:
        if not buffer:
            return
        used = buffer["used_large_pages"]
        states = {"used": used, "empty": buffer["large_pages"] - used}
        text = "Large pages of the CPU buffer, by state."
        self.add(GAUGE, "cpu_buffer_large_pages", text, states, "state")
        moved = {"out": buffer["out_bytes"], "in": buffer["in_bytes"]}
        self.add(COUNTER, "cpu_buffer_bytes", "Bytes copied, by direction.", moved, "way")

    def _add_sections(self, sections: dict[str, int]) -> None:
        now = {name: sections.get(name, 0) for name in ("lent", "borrowed")}
        self.add(GAUGE, "kv_sections", "Remote sections of 512 tokens, by owner.", now, "side")
        ended = {name: sections.get(name, 0) for name in ("returned", "replaced", "lost")}
        text = "Recalled sections, by whether they were copied back in time."
        self.add(COUNTER, "kv_sections_recalled", text, ended, "end")

    def _add_info(self, name: str, text: str, rows: Sequence[Mapping[str, int | str]]) -> None:
        keys = tuple(rows[0]) if rows else ()
        family = GaugeMetricFamily(f"kvell:{name}", text, labels=(*LABELS, *keys))
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
