"""What a cluster's run comes to, by role and altogether."""

from collections.abc import Sequence
from typing import Any

from kvell.simulator.cluster.cluster import VirtualCluster
from kvell.simulator.cluster.instance import VirtualInstance


def cluster_figures(cluster: VirtualCluster) -> dict[str, Any]:
    """Return the figures of a run; those of incarnations that died are among them.

    A text *arrives* when another instance announces it; what the receiver had of it already did
    not have to cross.
    """
    instances = [*cluster.past, *cluster.instances.values()]
    front, sent = cluster.front, cluster.transport.total()
    moved_bytes = sum(cluster.network.pulled_bytes.values())
    reasons = [end.reason for end in front.ends.values()]
    output_tokens = sum(map(len, front.outputs.values()))
    seconds = max((one.finish_seconds or 0.0 for one in front.requests), default=0.0)
    return {
        "instances": dict(cluster.spec.counts),
        "routing": cluster.spec.routing,
        "pd_caching": cluster.spec.pd_caching,
        "kv_memory_bytes": cluster.spec.layout.pool_bytes,
        "max_model_len": cluster.spec.limits.max_model_len,
        "link_bytes_per_second": cluster.spec.links.pages.bandwidth_bytes,
        "requests_finished": sum(reason in ("stop", "length") for reason in reasons),
        "requests_refused": len(front.requests) - sum(r in ("stop", "length") for r in reasons),
        "requests_moved": front.moved,
        "moved_bytes": moved_bytes,
        "messages": sent.sent,
        "output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / max(1e-9, seconds),
        "virtual_seconds": seconds,
        "sections": _sections(instances),
        "roles": {
            role: _role_figures(cluster, [one for one in instances if one.role == role], seconds)
            for role in cluster.spec.counts
        },
    }


def _role_figures(
    cluster: VirtualCluster, instances: Sequence[VirtualInstance], seconds: float
) -> dict[str, Any]:
    stats = [one.core.stats() for one in instances]
    counts = [one.counts for one in instances]
    queries = sum(one.prefix_cache_queries for one in stats)
    hits = sum(one.prefix_cache_hits for one in stats)
    arriving = sum(one.arriving_tokens for one in counts)
    were_there = sum(one.arriving_hits for one in counts)
    names = {one.name for one in instances}
    busy_seconds = sum(one.busy_seconds for one in counts)
    return {
        "instances": cluster.spec.counts[instances[0].role],
        "steps": sum(one.steps for one in counts),
        "busy": busy_seconds / max(1e-9, seconds * len(names)),
        "computed_tokens": sum(one.computed_tokens for one in counts),
        "prompt_tokens": queries,
        "hit_tokens": hits,
        "hit_rate": hits / max(1, queries),
        "arriving_tokens": arriving,
        "arriving_hit_tokens": were_there,
        "arriving_hit_rate": were_there / max(1, arriving),
        "pulled_bytes": sum(cluster.network.pulled_bytes.get(name, 0) for name in names),
        "preemptions": sum(one.preemptions for one in stats),
        "sections": _sections(instances),
    }


def _sections(instances: Sequence[VirtualInstance]) -> dict[str, int]:
    """Return how many sections were lent by these instances and read elsewhere by them.

    Of those read elsewhere ``returned`` were copied home and ``lost`` were computed anew;
    ``recalled`` are those that creditors wanted back.
    """
    ended = [one.core.stats().sections for one in instances]
    counts = [one.counts for one in instances]
    return {
        "lent": sum(len(one.lent) for one in counts),
        "borrowed": sum(len(one.borrowed) for one in counts),
        "returned": sum(one["returned"] for one in ended),
        "lost": sum(one["lost"] for one in ended),
        "recalled": sum(len(one.recalled) for one in counts),
    }
