"""``/debug/memory``: the memory contract, and the memory that processes take now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvell.cost.prices import USUAL_PRICES, describe_prices
from kvell.engine.protocol.statistics import GroupStats, InstanceFacts, InstanceReport, Stats
from kvell.engine.setup.contract import size

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
