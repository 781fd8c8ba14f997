"""``/debug/memory``: what was promised of the machine's memory, and who has it now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvell.device.process_size import process_bytes, tree_bytes
from kvell.engine.protocol.messages import Ready
from kvell.engine.protocol.statistics import GroupStats, Stats
from kvell.engine.setup.contract import size

CHUNKS = "_chunks"
GAUGES = ("chunk_bytes", "stale_positions", "withheld_large_pages", "largest_step_chunks")


def chunks_by_state(memory: dict[str, int]) -> dict[str, int]:
    """Chunks of a shared pool by owner and state; empty if the pool is KV's alone."""
    return {
        name.removesuffix(CHUNKS): count
        for name, count in memory.items()
        if name.endswith(CHUNKS) and name not in GAUGES
    }


def moves_by_kind(memory: dict[str, int]) -> dict[str, int]:
    """How many chunks moved, were mapped, were given ahead, …, since the start."""
    return {n: c for n, c in memory.items() if n not in GAUGES and not n.endswith(CHUNKS)}


@dataclass(frozen=True)
class InstanceMemory:
    """What is known of one instance's memory.

    :param pid: None while it has no process, or none of this machine.
    """

    ready: Ready
    stats: Stats
    pid: int | None


def contract_of_all(parts: Sequence[Mapping[str, int]], *, shares_weights: bool = True) -> int:
    """``contract_bytes`` of instances together.

    :param parts: the memory contract of each.
    :param shares_weights: whether their weights are in memory once, as on one host.
    """
    promised_bytes = sum(one.get("contract_bytes", 0) for one in parts)
    if not shares_weights:
        return promised_bytes
    weights = [one.get("weights_bytes", 0) for one in parts]
    return promised_bytes - sum(weights) + max(weights, default=0)


def contract_lines(
    contracts: Mapping[str, Mapping[str, int]],
    front_bytes: int,
    *,
    shares_weights: bool = True,
) -> list[str]:
    """The memory contract of several instances, a line for each process and one for the whole.

    :param contracts: the parts of each, by instance id.
    :param front_bytes: of this process before it served anything, and for its work.
    :param shares_weights: see :func:`contract_of_all`.
    """
    rows = {name: parts.get("contract_bytes", 0) for name, parts in contracts.items()}
    parts = list(contracts.values())
    whole_bytes = contract_of_all(parts, shares_weights=shares_weights) + front_bytes
    shared_bytes = sum(rows.values()) + front_bytes - whole_bytes
    return [
        "memory contract, at most",
        f"  {'front':<18}  {size(front_bytes)}",
        *(f"  {name:<18}  {size(promised_bytes)}" for name, promised_bytes in rows.items()),
        *([f"  {'shared weights':<18} -{size(shared_bytes)}"] if shared_bytes else []),
        f"  {'all processes':<18}  {size(whole_bytes)}",
    ]


def memory_page(
    instances: Mapping[str, InstanceMemory],
    front_floor_bytes: int,
    front_work_bytes: int = 0,
    *,
    shares_weights: bool = True,
) -> dict[str, Any]:
    """Everything as plain data.

    :param instances: those that answered, by id.
    :param front_floor_bytes: of this process before it served anything.
    :param front_work_bytes: the most that reading texts and pictures takes beside that.
    :param shares_weights: see :func:`contract_of_all`.
    :returns: ``contract_bytes`` is of all processes together; ``now_bytes`` what each takes;
        ``instances`` has every instance's own.  A single instance's figures stand at the top too.
    """
    pages = {name: _instance_page(one) for name, one in instances.items()}
    contracts = [one.ready.memory for one in instances.values()]
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
            "front": process_bytes(),
            "instance": sum(page["now_bytes"] for page in pages.values()),
        },
        "instances": pages,
    }


def _instance_page(one: InstanceMemory) -> dict[str, Any]:
    stats = one.stats
    return {
        "parts": dict(one.ready.memory),
        "now_bytes": tree_bytes(one.pid) if one.pid else 0,
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
