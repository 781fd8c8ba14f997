"""The cost of moving a 2 MiB chunk between KV cache and activations on the host.

See README.md beside this file.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench import result_file
from kvell.device.chunks import AddressRange, Ints
from kvell.device.host_chunks import HostChunks
from kvell.elastic.balloon import Balloon
from kvell.elastic.memory import ElasticMemory
from kvell.elastic.tiling import tiling
from kvell.memory import GroupKind, LayerSpec, create_core, plan_layout
from kvell.vocabulary import KIB, MIB

SMALL_PAGE_BYTES = 4 * KIB
LAYERS = 30
"""Layers of SmolLM2-135M (3 heads of 64, bfloat16), whose pool chunks are moved in."""


@dataclass(frozen=True)
class Figure:
    """Microseconds of one chunk, over all rounds."""

    name: str
    best_us: float
    median_us: float


def seconds_of(call: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def scattered(count: int, seed: int) -> Ints:
    """Chunks in random order, so that no two coalesce into one call."""
    return np.random.default_rng(seed).permutation(count).astype(np.int32)


def mapping_round(num_chunks: int, seed: int, populate: bool) -> dict[str, float]:
    """Microseconds a chunk of commit, map, touch and unmap, over a fresh memfd."""
    device = HostChunks(num_chunks)
    try:
        every, chunks = np.arange(num_chunks, dtype=np.int32), scattered(num_chunks, seed)
        found = {
            "commit, once": 1e6 / num_chunks * seconds_of(lambda: device.commit(every)),
            "touch of what is mapped already": touch_us(device, device.home),
        }
        area = device.reserve(num_chunks)
        suffix = " and populate" if populate else ""
        for kind, source in (("scattered", chunks), ("in a row", every)):
            label = f"map{suffix}, {kind}"
            begin = time.perf_counter()
            device.map(area, every, source, populate=populate)
            found[label] = 1e6 / num_chunks * (time.perf_counter() - begin)
            found[f"first touch after {label}"] = touch_us(device, area)
            unmapping = seconds_of(lambda: device.unmap(area, every))
            found[f"unmap after {label}"] = 1e6 / num_chunks * unmapping
        return found
    finally:
        device.close()


def touch_us(device: HostChunks, area: AddressRange) -> float:
    """Microseconds to write a byte in every small page of a chunk.

    The median over chunks: interruptions by other processes hit only a few of them.
    """
    rows = np.frombuffer(device.view(area), np.uint8).reshape(area.num_positions, -1)
    samples = []
    for row in rows:
        begin = time.perf_counter()
        row[::SMALL_PAGE_BYTES] = 1
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples) * 1e6


def ownership_round(num_chunks: int) -> dict[str, float]:
    """Microseconds per chunk of the moves in a step, decisions and core calls included."""
    layers = [LayerSpec(i, GroupKind.FULL, 3, 64, 2) for i in range(LAYERS)]
    device = HostChunks(num_chunks)
    try:
        layout = plan_layout(layers, kv_memory_bytes=num_chunks * device.chunk_bytes)
        tiled = tiling(num_chunks, device.chunk_bytes, layout.large_page_bytes)
        memory = ElasticMemory(device, create_core(layout), tiled)
        used = num_chunks // 2
        size_bytes = used * device.chunk_bytes
        found = {}
        before = time.perf_counter()
        slot = memory.grant(size_bytes, 1)
        found["deflate: withhold, map, grant"] = time.perf_counter() - before
        if slot is None:
            raise RuntimeError("an empty pool has no room")
        memory.release(slot, 1)
        found["grant of a slot that is mapped, once"] = used * seconds_of(
            lambda: memory.grant(size_bytes, 2)
        )
        memory.release(slot, 2)
        planning = seconds_of(lambda: memory.balloon.plan_inflation(layout.num_large_pages))
        found["reclaim: choose idle chunks"] = planning
        found["inflate: reclaim, transfer, restore"] = seconds_of(
            lambda: memory.inflate(layout.num_large_pages)
        )
        found["ownership transfer alone"] = transfer_seconds(num_chunks, used)
        found["unmap behind the fence"] = seconds_of(lambda: memory.tend(2))
        return {name: seconds * 1e6 / used for name, seconds in found.items()}
    finally:
        device.close()


def transfer_seconds(num_chunks: int, used: int) -> float:
    """Seconds of the balloon's bookkeeping alone: chunks of a released slot become KV's."""
    balloon = Balloon(tiling(num_chunks, 2 * MIB, 2 * MIB), 2 * num_chunks)
    order = np.ones(num_chunks, np.int64)
    slot = balloon.plan_slot(used, lambda: order)
    if slot is None:
        raise RuntimeError("an empty pool has no room")
    balloon.settle(slot, 1)
    balloon.release(slot.start, slot.count, 1)
    plan = balloon.plan_inflation(used)
    return seconds_of(lambda: balloon.settle(plan))


def figures(rounds: list[dict[str, float]]) -> list[Figure]:
    """Best and median of the rounds."""
    return [
        Figure(name, min(samples), statistics.median(samples))
        for name in rounds[0]
        for samples in [[found[name] for found in rounds]]
    ]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=256, help="chunks of 2 MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    """Print best and median of all rounds."""
    args = arguments()
    rounds = [
        mapping_round(args.chunks, n, populate=False)
        | mapping_round(args.chunks, n, populate=True)
        | ownership_round(args.chunks)
        for n in range(args.rounds)
    ]
    found = figures(rounds)
    device = HostChunks(args.chunks)
    device.commit(np.arange(args.chunks, dtype=np.int32))
    print(f"{args.chunks} chunks, {device.num_huge} of them huge; {args.rounds} rounds; µs a chunk")
    print(f"{'':52} {'best':>9} {'median':>9}")
    for figure in found:
        print(f"{figure.name:52} {figure.best_us:9.2f} {figure.median_us:9.2f}")
    if args.json:
        result = {
            "chunks": args.chunks,
            "huge_chunks": device.num_huge,
            "rounds": args.rounds,
            "unit": "us per 2 MiB chunk",
            "figures": [asdict(figure) for figure in found],
        }
        result_file.write(args.json, result)
    device.close()


if __name__ == "__main__":
    main()
