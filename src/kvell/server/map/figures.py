"""The data of the memory map: ids and counts, and never a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from kvell.engine.protocol.pages import LargePage, Miss, PageOwner, Pages
from kvell.engine.protocol.statistics import Stats
from kvell.fleet.fleet import MemberStatus
from kvell.front.request_log import LogEntry
from kvell.front.request_queue import Entries
from kvell.server.map.history import InstanceLoans, TransferRow

NO_LOANS = InstanceLoans()
MOST_REQUESTS = 200
"""The most requests that are listed; all requests are counted."""
STATS_FIELDS = tuple(
    (
        "step running waiting prompt_tokens output_tokens preemptions large_page_bytes rungs "
        "sections team"
    ).split()
)
GROUP_FIELDS = ("name", "used_pages", "cached_pages", "evicted_pages", "hit_tokens")
COLUMNS = ("group", "used", "cached", "age", "lent")


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
    owners = [_rename_fields(owner, request_id="id") for owner in page.owners]
    return _rename_fields(page, age="age_steps") | {"owners": owners}


def _rename_fields(record: LargePage | PageOwner | Miss, **names: str) -> dict[str, Any]:
    """Return the fields of a record, some under other names."""
    return {names.get(name, name): value for name, value in vars(record).items()}


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
        "stats": None if stats is None else _stats(instance, stats),
        "pages": None if pages is None else _pages(pages),
    }


def _stats(instance: InstanceSnapshot, stats: Stats) -> dict[str, Any]:
    queries = stats.prefix_cache_queries
    groups = [
        {name: getattr(group, name) for name in GROUP_FIELDS}
        | {"hit_rate": group.hit_tokens / queries if queries else None}
        for group in stats.groups
    ]
    return {
        **{name: getattr(stats, name) for name in STATS_FIELDS},
        "bytes": bytes_by_use(stats),
        "query_tokens": queries,
        "hit_tokens": stats.prefix_cache_hits,
        "groups": groups,
        "rungs_before": instance.rungs_before,
    }


def _pages(pages: Pages) -> Mapping[str, Any]:
    """Return an instance's pages; columns stay bytes, which the JSON encoder writes as base64."""
    return {
        "step": pages.step,
        "groups": pages.groups,
        "columns": {name: getattr(pages, name) for name in COLUMNS},
        "misses": [_rename_fields(miss, request_id="id") for miss in pages.misses],
    }
