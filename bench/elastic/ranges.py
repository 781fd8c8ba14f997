"""The cost of an address range for every request, as eLLM has them, against page tables.

See README.md beside this file.  Arithmetic and a small model of slots: no memory is touched.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench import result_file
from bench.memory.page_sizes import CHUNK_BYTES, SHAPES, Shape
from kvell.memory import GroupSpec, Layout, plan_layout, policy_of, request_bytes
from kvell.vocabulary import GIB

CONTEXT_TOKENS = 128 << 10


@dataclass(frozen=True)
class Ranges:
    """One shape.

    :param tokens_a_chunk: tokens per chunk of each layer group: the granularity of sharing.
    :param bytes_at: by tokens of a request: (needed, as ranges, as pages).
    :param address_gib: reserved for 256 requests of 128 K tokens.
    :param maps_a_token: driver calls per token that a request grows by.
    :param slot_waste: unneeded part of the bytes in used slots, with best fit and reuse.
    :param slot_maps: chunks mapped per request served.
    """

    shape: str
    tokens_a_chunk: tuple[int, ...]
    bytes_at: dict[int, tuple[int, int, int]]
    address_gib: float
    maps_a_token: float
    slot_waste: float
    slot_maps: float


def live_bytes(group: GroupSpec, tokens: int) -> int:
    """Bytes of a request that a later step may read."""
    return group.token_bytes * policy_of(group).live_tokens(tokens)


def range_chunks(group: GroupSpec, tokens: int) -> int:
    """Whole chunks that a range has mapped, from the first live token to the last."""
    end = tokens * group.token_bytes
    begin = end - live_bytes(group, tokens)
    return -(-end // CHUNK_BYTES) - begin // CHUNK_BYTES


@dataclass
class Slots:
    """eLLM's pool of KV slots for one group: freed slots stay mapped, and are reused best fit."""

    group: GroupSpec
    free: list[int]
    mapped: int = 0

    def take(self, tokens: int) -> int:
        """Take a slot for ``tokens`` tokens; returns its chunks."""
        want = range_chunks(self.group, tokens)
        fitting = [size for size in self.free if size >= want]
        if fitting:
            self.free.remove(min(fitting))
            return min(fitting)
        self.mapped += want
        return want

    def grow(self, size: int, tokens: int) -> int:
        """Grow a slot to ``tokens`` tokens; returns its chunks."""
        want = range_chunks(self.group, tokens)
        self.mapped += max(0, want - size)
        return max(size, want)


def serve(groups: Sequence[GroupSpec], lengths: Sequence[tuple[int, int]], batch: int) -> Ranges:
    """Serve requests (prompt, output) in order, ``batch`` at a time; fills waste and maps only."""
    pools = [Slots(group, []) for group in groups]
    seats: list[tuple[int, list[int]]] = []
    held = needed = 0
    for prompt, output in lengths:
        if len(seats) == batch:
            tokens, sizes = seats.pop(0)
            needed += sum(live_bytes(group, tokens) for group in groups)
            held += sum(sizes) * CHUNK_BYTES
            for pool, size in zip(pools, sizes, strict=True):
                pool.free.append(size)
        sizes = [pool.take(prompt) for pool in pools]
        tokens = prompt + output
        grown = [pool.grow(size, tokens) for pool, size in zip(pools, sizes, strict=True)]
        seats.append((tokens, grown))
    maps = sum(pool.mapped for pool in pools) / len(lengths)
    return Ranges("", (), {}, 0.0, 0.0, 1 - needed / held, maps)


def chat_lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens: log-normal, medians 600 and 200, as conversations have them."""
    draw = np.random.default_rng(seed)
    prompts = np.clip(draw.lognormal(np.log(600), 1.2, count), 16, 32_000).astype(int)
    outputs = np.clip(draw.lognormal(np.log(200), 0.9, count), 8, 4_000).astype(int)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def ranges_of(shape: Shape, tokens: Sequence[int], pool_bytes: int) -> Ranges:
    """All figures of a shape."""
    layout = plan_layout(shape.specs(), kv_memory_bytes=pool_bytes)
    served = serve(layout.groups, chat_lengths(4_000, seed=1), batch=64)
    return Ranges(
        shape.name,
        tuple(CHUNK_BYTES // group.token_bytes for group in layout.groups),
        {n: _bytes_at(layout, n) for n in tokens},
        256 * CONTEXT_TOKENS * sum(group.token_bytes for group in layout.groups) / GIB,
        sum(group.token_bytes for group in layout.groups) / CHUNK_BYTES,
        served.slot_waste,
        served.slot_maps,
    )


def _bytes_at(layout: Layout, tokens: int) -> tuple[int, int, int]:
    needed = sum(live_bytes(group, tokens) for group in layout.groups)
    ranges = CHUNK_BYTES * sum(range_chunks(group, tokens) for group in layout.groups)
    return needed, ranges, request_bytes(layout, tokens)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool-gib", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[300, 1_085, 20_000])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    """Print a line for each shape."""
    args = arguments()
    found = [ranges_of(shape, args.tokens, args.pool_gib * GIB) for shape in SHAPES]
    lengths = " / ".join(f"{n:,}" for n in args.tokens)
    print(f"waste of one request of {lengths} tokens, in % of what it holds: as ranges; as pages")
    for each in found:
        shares = [
            " / ".join(
                f"{100 * (1 - sizes[0] / sizes[at]):.1f}" for sizes in each.bytes_at.values()
            )
            for at in (1, 2)
        ]
        chunk = ", ".join(map(str, each.tokens_a_chunk))
        print(
            f"{each.shape:14} {shares[0]:>20} {shares[1]:>20}   tokens a chunk {chunk:>10}"
            f"   slots waste {100 * each.slot_waste:4.1f} %, map {each.slot_maps:5.1f} a request"
            f"   addresses {each.address_gib:6.0f} GiB   maps a token {each.maps_a_token:.4f}"
        )
    if args.json:
        result_file.write(
            args.json, [asdict(each) for each in found], processor=result_file.VIRTUAL
        )


if __name__ == "__main__":
    main()
