"""The data of the memory map: ids and counts, and never a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from kvell.engine.protocol.pages import LargePage, Miss, PageGroup, Pages
from kvell.engine.protocol.statistics import GroupStats, Stats
from kvell.fleet.fleet import MemberStatus
from kvell.front.request_log import LogEntry
from kvell.front.request_queue import Entries
from kvell.server.map.history import InstanceLoans, TransferRow

NO_LOANS = InstanceLoans()
MOST_REQUESTS = 200
"""The most requests that are listed; all requests are counted."""


@dataclass(frozen=True)
class InstanceSnapshot:
    """A snapshot of an instance; ``stats`` or ``pages`` is None if it did not answer in time.

    :param rungs_before: page allocations by rung at the beginning of the history; empty if unknown.
    """

    status: MemberStatus
    stats: Stats | None
    pages: Pages | None
    loans: InstanceLoans = NO_LOANS
    rungs_before: Mapping[str, int] = field(default_factory=dict)


class ServerLine(Struct, frozen=True):
    """The figures of the whole server, for the line at the top of the page.

    :param models: names of the models.
    :param dtype: dtype of the first model's computation; "" if it is unknown.
    :param prompt_tokens_per_second: over the last seconds; None if unknown.  The same for
        ``output_tokens_per_second``.
    :param ttft_p50_seconds: median time to first token of the history; None without tokens.  The
        same for ``tpot_p50_seconds``, of the time per output token.
    :param contract_bytes: the most memory of all processes, by their contracts; 0 if unknown.
    :param links: relative addresses of pages that a browser can open without a key.
    """

    models: tuple[str, ...]
    dtype: str = ""
    prompt_tokens_per_second: float | None = None
    output_tokens_per_second: float | None = None
    running: int = 0
    waiting: int = 0
    ttft_p50_seconds: float | None = None
    tpot_p50_seconds: float | None = None
    contract_bytes: int = 0
    links: tuple[str, ...] = ()


def map_body(
    instances: Sequence[InstanceSnapshot],
    entries: Entries,
    now_seconds: float,
    server: ServerLine | None = None,
    transfers: Sequence[TransferRow] = (),
) -> dict[str, Any]:
    """Return the data of one refresh of the page.

    :param server: None leaves the line at the top out.
    """
    in_flight, waiting, idle_wait, _ = entries
    rows = [request_row(entry, now_seconds) for entry in (*in_flight, *waiting)[:MOST_REQUESTS]]
    requests = {"running": len(in_flight), "waiting": len(waiting), "rows": rows}
    return {
        "at_seconds": now_seconds,
        "server": server,
        "instances": [_instance(instance) for instance in instances],
        "requests": {**requests, "idle_wait": None if idle_wait is None else idle_wait._asdict()},
        "transfers": transfers,
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
        "pid": status.pid,
        "loans": instance.loans,
        "stats": None if stats is None else _stats(stats) | {"rungs_before": instance.rungs_before},
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
            "lent": pages.lent,
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
