"""The data of the memory map: ids and counts, and never a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvell.engine.protocol.pages import LargePage, Miss, PageGroup, Pages
from kvell.engine.protocol.statistics import GroupStats, Stats
from kvell.fleet.started.member import MemberStatus
from kvell.front.request_log import LogEntry
from kvell.front.waiting_line import Entries

MOST_REQUESTS = 200
"""The most requests that are listed; all requests are counted."""


@dataclass(frozen=True)
class InstanceSnapshot:
    """A snapshot of an instance; ``stats`` or ``pages`` is None if it did not answer in time."""

    status: MemberStatus
    stats: Stats | None
    pages: Pages | None


def map_body(
    instances: Sequence[InstanceSnapshot],
    entries: Entries,
    now_seconds: float,
) -> dict[str, Any]:
    """Return the data of one refresh of the page."""
    in_flight, waiting, idle_wait = entries
    rows = [request_row(entry, now_seconds) for entry in (*in_flight, *waiting)[:MOST_REQUESTS]]
    requests = {"running": len(in_flight), "waiting": len(waiting), "rows": rows}
    return {
        "at_seconds": now_seconds,
        "instances": [_instance(instance) for instance in instances],
        "requests": {**requests, "idle_wait": None if idle_wait is None else idle_wait._asdict()},
    }


def request_row(entry: LogEntry, now_seconds: float) -> dict[str, Any]:
    """Return the row of a request that has not ended.

    ``tpot_seconds`` is the time per token after the first; None before the second.
    """
    first, last = entry.first_token_seconds, entry.last_token_seconds
    later_tokens = entry.emitted_tokens - 1
    has_pace = first is not None and last is not None and later_tokens > 0
    return {
        "id": entry.shown_id,
        "instance": entry.line,
        "state": _state(entry),
        "prompt_tokens": entry.prompt_tokens,
        "output_tokens": entry.emitted_tokens,
        "age_seconds": now_seconds - entry.arrived_seconds,
        "ttft_seconds": None if first is None else first - entry.arrived_seconds,
        "tpot_seconds": ((last or 0.0) - (first or 0.0)) / later_tokens if has_pace else None,
    }


def large_page_body(page: LargePage) -> dict[str, Any]:
    """Return one large page and its owners."""
    return {
        "large_page": page.large_page,
        "step": page.step,
        "group": page.group,
        "used": page.used,
        "cached": page.cached,
        "free": page.free,
        "age_steps": page.age,
        "owners": [
            {
                "id": owner.request_id,
                "pages": owner.pages,
                "first_token": owner.first_token,
                "end_token": owner.end_token,
            }
            for owner in page.owners
        ],
        "more_owners": page.more_owners,
        "other_used": page.other_used,
        "cached_ends": list(page.cached_ends),
    }


def bytes_by_use(stats: Stats) -> dict[str, int | None]:
    """Return the pool's bytes by use.

    ``activation`` is None if activations share no pool with KV, and ``cpu_buffer`` if there is no
    CPU buffer.
    """
    used = sum(group.used_pages * group.page_bytes for group in stats.groups)
    cached = sum(group.cached_pages * group.page_bytes for group in stats.groups)
    withheld = stats.memory.get("withheld_large_pages", 0) * stats.large_page_bytes
    pool = stats.large_pages * stats.large_page_bytes
    chunk_bytes = stats.memory.get("chunk_bytes")
    active_chunks = stats.memory.get("activation_used_chunks", 0)
    buffered_pages = stats.buffer.get("used_large_pages")
    return {
        "pool": pool,
        "kv_used": used,
        "kv_cached": cached,
        "kv_free": max(0, pool - withheld - used - cached),
        "withheld": withheld,
        "activation": None if chunk_bytes is None else active_chunks * chunk_bytes,
        "cpu_buffer": None if buffered_pages is None else buffered_pages * stats.large_page_bytes,
    }


def _state(entry: LogEntry) -> str:
    if entry.is_dropped:
        return "ending"
    if not entry.line:
        return "waiting"
    return "running" if entry.emitted_tokens else "prefilling"


def _instance(instance: InstanceSnapshot) -> dict[str, Any]:
    status, stats, pages = instance.status, instance.stats, instance.pages
    return {
        "id": status.instance_id,
        "role": status.role,
        "state": status.state,
        "restarts": status.restarts,
        "stats": None if stats is None else _stats(stats),
        "pages": None if pages is None else _pages(pages),
    }


def _stats(stats: Stats) -> dict[str, Any]:
    return {
        "step": stats.step,
        "running": stats.running,
        "waiting": stats.waiting,
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens": stats.output_tokens,
        "preemptions": stats.preemptions,
        "large_page_bytes": stats.large_page_bytes,
        "bytes": bytes_by_use(stats),
        "rungs": stats.rungs,
        "sections": stats.sections,
        "team": stats.team,
        "query_tokens": stats.prefix_cache_queries,
        "hit_tokens": stats.prefix_cache_hits,
        "groups": [_group_stats(group, stats.prefix_cache_queries) for group in stats.groups],
    }


def _group_stats(group: GroupStats, query_tokens: int) -> dict[str, Any]:
    return {
        "name": group.name,
        "used_pages": group.used_pages,
        "cached_pages": group.cached_pages,
        "evicted_pages": group.evicted_pages,
        "hit_tokens": group.hit_tokens,
        "hit_rate": group.hit_tokens / query_tokens if query_tokens else None,
    }


def _pages(pages: Pages) -> Mapping[str, Any]:
    """Return an instance's pages; columns stay bytes, which the JSON encoder writes as base64."""
    return {
        "step": pages.step,
        "groups": [_page_group(group) for group in pages.groups],
        "columns": {
            "group": pages.group,
            "used": pages.used,
            "cached": pages.cached,
            "age": pages.age,
        },
        "misses": [_miss(miss) for miss in pages.misses],
    }


def _page_group(group: PageGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "kind": group.kind,
        "layers": group.layers,
        "page_tokens": group.page_tokens,
        "page_bytes": group.page_bytes,
        "pages_per_large": group.pages_per_large,
    }


def _miss(miss: Miss) -> dict[str, Any]:
    return {
        "id": miss.request_id,
        "step": miss.step,
        "prompt_tokens": miss.prompt_tokens,
        "hit_tokens": miss.hit_tokens,
        "seen_tokens": miss.seen_tokens,
        "steps_ago": miss.steps_ago,
        "reason": miss.reason,
        "groups": list(miss.groups),
    }
