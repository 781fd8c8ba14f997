"""The figures of a cluster's run, by role and in total."""

from collections.abc import Sequence
from typing import Any

from kvell.simulator.cluster.cluster import VirtualCluster
from kvell.simulator.cluster.instance import VirtualInstance


def cluster_figures(cluster: VirtualCluster) -> dict[str, Any]:
    """Return the figures of a run, dead incarnations included.

    A text *arrives* when another instance announces it; the tokens that the receiver had already
    did not have to be transferred.
    """
    instances = [*cluster.past, *cluster.instances.values()]
    front, links, sent = cluster.front, cluster.spec.links, cluster.transport.total()
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
        "sections": _sections(instances),
    }


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
