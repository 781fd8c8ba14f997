"""The figures of a cluster's run: by role and in total, or those of its only engine."""

from collections.abc import Sequence
from typing import Any

from kvell.simulator.cluster.cluster import VirtualCluster
from kvell.simulator.cluster.instance import VirtualInstance
from kvell.simulator.report.metrics import StepMeans


def cluster_figures(cluster: VirtualCluster) -> dict[str, Any]:
    """Return the figures of a run, dead incarnations included.

    A text *arrives* when another instance announces it; the tokens that the receiver had already
    did not have to be transferred.
    """
    instances = [*cluster.past, *cluster.instances.values()]
    front = cluster.front
    links = cluster.spec.links
    sent = cluster.transport.total()
    moved_bytes = sum(cluster.network.pulled_bytes.values())
    output_tokens = sum(map(len, front.outputs.values()))
    seconds = max((request.finish_seconds or 0.0 for request in front.requests), default=0.0)
    return {
        "instances": dict(cluster.spec.counts),
        "routing": cluster.spec.routing,
        "pd_caching": cluster.spec.pd_caching,
        "kv_memory_bytes": cluster.spec.layout.pool_bytes,
        "max_model_len": cluster.spec.limits.max_model_len,
        "link_bytes_per_second": links and links.pages.bandwidth_bytes,
        "requests_finished": front.num_finished,
        "requests_refused": len(front.requests) - front.num_finished,
        "requests_moved": front.moved,
        "moved_bytes": moved_bytes,
        "messages": sent.sent,
        "output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / max(1e-9, seconds),
        "virtual_seconds": seconds,
        "sections": _sections(instances),
        "roles": {
            role: _role_figures(
                cluster, [instance for instance in instances if instance.role == role], seconds
            )
            for role in cluster.spec.counts
        },
    }


def engine_figures(cluster: VirtualCluster) -> dict[str, Any]:
    (instance,) = cluster.instances.values()
    engine, meter, front = instance.core, instance.meter, cluster.front
    stats = engine.stats()
    seconds = cluster.loop.now_seconds
    steps = engine.step
    every, saturated = meter.means.means(), meter.means.means(saturated=True)
    manager_us = meter.memory.nanoseconds / 1e3
    groups = [
        figures | {"evicted_pages": group.evicted_pages, "hit_tokens": group.hit_tokens}
        for figures, group in zip(meter.means.group_figures(), stats.groups, strict=True)
    ]
    return {
        "requests_finished": front.num_finished,
        "requests_refused": len(front.requests) - front.num_finished,
        "steps": steps,
        "batch_mean": every.batch,
        "hit_rate": stats.prefix_cache_hits / max(1, stats.prefix_cache_queries),
        "waste": every.waste,
        "stranded": every.stranded,
        "manager_us_per_step": manager_us / max(1, steps),
        "manager_us_per_request_step": manager_us / max(1, meter.scheduled),
        "short_of_memory": meter.short_of_memory / max(1, steps),
        "preemptions": stats.preemptions,
        "protected_prefixes": stats.protected_prefixes,
        "protected_tokens": stats.protected_tokens,
        "kv_memory_bytes": cluster.spec.layout.pool_bytes,
        "wall_seconds": cluster.wall_seconds,
        "batch_saturated_mean": saturated.batch,
        "waste_saturated": saturated.waste,
        "stranded_saturated": saturated.stranded,
        "virtual_seconds": seconds,
        "output_tokens": stats.output_tokens,
        "output_tokens_per_second": stats.output_tokens / max(1e-9, seconds),
        "spec_decode_drafts": stats.spec_decode_drafts,
        "spec_decode_draft_tokens": stats.spec_decode_draft_tokens,
        "spec_decode_accepted_tokens": stats.spec_decode_accepted_tokens,
        "max_running": engine.max_running,
        "max_model_len": engine.limits.max_model_len,
        "rungs": stats.rungs,
        "cpu_buffer": stats.buffer,
        "groups": groups,
    }


def _role_figures(
    cluster: VirtualCluster, instances: Sequence[VirtualInstance], seconds: float
) -> dict[str, Any]:
    stats = [instance.core.stats() for instance in instances]
    counts = [instance.counts for instance in instances]
    queries = sum(entry.prefix_cache_queries for entry in stats)
    hits = sum(entry.prefix_cache_hits for entry in stats)
    arriving = sum(entry.arriving_tokens for entry in counts)
    were_there = sum(entry.arriving_hits for entry in counts)
    names = {instance.name for instance in instances}
    busy_seconds = sum(entry.busy_seconds for entry in counts)
    return {
        "instances": cluster.spec.counts[instances[0].role],
        "steps": sum(entry.steps for entry in counts),
        "busy": busy_seconds / max(1e-9, seconds * len(names)),
        "computed_tokens": sum(entry.computed_tokens for entry in counts),
        "prompt_tokens": queries,
        "hit_tokens": hits,
        "hit_rate": hits / max(1, queries),
        "arriving_tokens": arriving,
        "arriving_hit_tokens": were_there,
        "arriving_hit_rate": were_there / max(1, arriving),
        "pulled_bytes": sum(cluster.network.pulled_bytes.get(name, 0) for name in names),
        "preemptions": sum(entry.preemptions for entry in stats),
        **_step_means(cluster, instances),
        "sections": _sections(instances),
    }


def _step_means(cluster: VirtualCluster, instances: Sequence[VirtualInstance]) -> dict[str, float]:
    """Return means over the sampled steps of instances; none if nothing is sampled."""
    steps = StepMeans(cluster.spec.layout)
    for instance in instances:
        steps.samples += instance.meter.means.samples
    means = steps.means()
    figures = {"batch_mean": means.batch, "waste": means.waste, "stranded": means.stranded}
    return figures if steps.samples else {}


def _sections(instances: Sequence[VirtualInstance]) -> dict[str, int]:
    """Return the numbers of sections that these instances lent, and read at other instances.

    Of the latter, ``returned`` were copied back and ``lost`` were computed again; ``recalled`` are
    those that creditors claimed back.
    """
    ended = [entry.core.stats().sections for entry in instances]
    counts = [entry.counts for entry in instances]
    return {
        "lent": sum(len(entry.lent) for entry in counts),
        "borrowed": sum(len(entry.borrowed) for entry in counts),
        "returned": sum(entry["returned"] for entry in ended),
        "lost": sum(entry["lost"] for entry in ended),
        "recalled": sum(len(entry.recalled) for entry in counts),
    }
