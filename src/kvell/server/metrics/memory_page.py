"""``/debug/memory``: what was promised of the machine's memory, and who has it now."""

from typing import Any

from kvell.device.process_size import process_bytes
from kvell.engine.protocol.messages import GroupStats, Ready, Stats

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


def memory_page(
    ready: Ready, stats: Stats, front_floor_bytes: int, instance_pid: int | None
) -> dict[str, Any]:
    """Everything as plain data.

    :param front_floor_bytes: of this process before it served anything.
    :returns: ``contract_bytes`` is of both processes together; ``now_bytes`` what each takes.
    """
    return {
        "contract_bytes": ready.memory.get("contract_bytes", 0) + front_floor_bytes,
        "parts": {**ready.memory, "front_floor_bytes": front_floor_bytes},
        "now_bytes": {
            "front": process_bytes(),
            "instance": process_bytes(instance_pid) if instance_pid else 0,
        },
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
