"""Microseconds of the memory pool's calls, and gigabytes per second between two processes.

Run from the repository's root: ``python -m bench.mempool.calls``.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from bench import result_file
from bench.mempool.shapes import MOVED_POOL_BYTES, POOL_BYTES, SHAPES
from bench.mempool.timing import Figures, spread, text_of, timed
from bench.mempool.transports import measured
from bench.replay.shapes import layout_of, read_shape
from kvell.memory import Layout, create_core
from kvell.mempool.holds import Holds
from kvell.mempool.owners import Owner
from kvell.mempool.pool import MemPool

TEXT_TOKENS = 4096
PAGE_COUNTS = (1, 16, 256)
PARTS = ("calls", "transfers")


def calls_of_pool(layout: Layout, rounds: int) -> dict[str, Figures]:
    """Calls from another thread, which waits for each answer."""
    group = layout.groups[0].name
    told: dict[str, list[float]] = {}
    with MemPool(layout, instance="bench") as pool:
        for number in range(rounds):
            for count in PAGE_COUNTS:
                start = time.perf_counter()
                lease = pool.alloc_mem(pages={group: count})
                told.setdefault(f"alloc_{count}", []).append(time.perf_counter() - start)
                free = timed(partial(pool.free_mem, lease))
                told.setdefault(f"free_{count}", []).append(free)
            text = text_of(number, TEXT_TOKENS).tolist()
            lease = pool.alloc_mem(tokens=TEXT_TOKENS)
            told.setdefault("insert", []).append(timed(partial(pool.insert, text, lease)))
            found = pool.match(text)
            assert found.hit_tokens == TEXT_TOKENS
            pool.free_mem(found)
            start = time.perf_counter()
            again = pool.match(text)
            told.setdefault("match", []).append(time.perf_counter() - start)
            pool.free_mem(again)
            told.setdefault("delete", []).append(timed(partial(pool.delete, text)))
    return {name: spread(seconds) for name, seconds in told.items()}


def calls_of_holds(layout: Layout, rounds: int) -> dict[str, Figures]:
    """The same where the memory core is, without another thread."""
    core = create_core(layout)
    holds, told = Holds(core), dict[str, list[float]]()
    number = 0

    def owner() -> Owner:
        nonlocal number
        number += 1
        return Owner("alloc", "bench", 1, number)

    def note(name: str, call: Callable[[], object]) -> None:
        told.setdefault(name, []).append(timed(call))

    for at in range(rounds):
        for count in PAGE_COUNTS:
            counts, mine = np.zeros(len(layout.groups), np.int32), owner()
            counts[0] = count
            note(f"alloc_{count}", partial(holds.hold_pages, mine, 1, counts))
            note(f"free_{count}", partial(holds.release, mine))
        text, mine = text_of(at, TEXT_TOKENS), owner()
        holds.hold_text(mine, 1, text)
        assert holds.receive(mine, TEXT_TOKENS) is not None
        note("insert", partial(holds.insert, mine, TEXT_TOKENS))
        asked, other = np.append(text, np.int32(-1)), owner()
        note("match", partial(holds.hold_text, other, 1, asked))
        assert holds[other].hit_tokens == TEXT_TOKENS
        holds.release(other)
        note("delete", partial(core.delete, text, ""))
    return {name: spread(seconds) for name, seconds in told.items()}


def main() -> None:
    """Measure every shape and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, dict[str, object]] = {}
    for shape in SHAPES:
        layout = layout_of(read_shape(shape), POOL_BYTES)
        figures[shape] = {}
        if "calls" in options.parts:
            figures[shape]["holds_us"] = calls_of_holds(layout, options.rounds)
            figures[shape]["pool_us"] = calls_of_pool(layout, options.rounds)
        if "transfers" in options.parts:
            layout = layout_of(read_shape(shape), MOVED_POOL_BYTES)
            figures[shape] |= measured(shape, layout, options.rounds)
        print(shape)
        for part, told in figures[shape].items():
            print(f"  {part}")
            assert isinstance(told, dict)
            for name, value in told.items():
                shown = (
                    value
                    if not isinstance(value, dict)
                    else {k: f"{v:.3g}" for k, v in value.items()}
                )
                print(f"    {name}: {shown}")
    if options.json:
        result_file.write(options.json, figures)


if __name__ == "__main__":
    main()
