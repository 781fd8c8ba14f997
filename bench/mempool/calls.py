"""Microseconds of the memory pool's calls, and gigabytes per second between two processes.

Run from the repository's root: ``python -m bench.mempool.calls``.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from bench import result_file
from bench.replay.shapes import layout_of, read_shape
from kvell.memory import Layout, create_core
from kvell.mempool.holds import Holds
from kvell.mempool.owners import Owner
from kvell.mempool.pool import MemPool
from kvell.mempool.transports.page_copies import Piece, copy_pieces, pieces_of
from kvell.vocabulary import GIB

SHAPES = ("llama3-8b", "gemma3-27b", "falcon-h1-7b")
POOL_BYTES = 3 * GIB
TEXT_TOKENS = 4096
PAGE_COUNTS = (1, 16, 256)
SENT_TOKENS = 2048
PATIENCE_SECONDS = 60.0

Figures = dict[str, float]


def spread(seconds: list[float], per: float = 1.0, unit: float = 1e6) -> Figures:
    """Median, lowest and highest, divided by ``per``; in microseconds by default."""
    told = [one * unit / per for one in seconds]
    return {"median": median(told), "low": min(told), "high": max(told)}


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def text_of(number: int, tokens: int = TEXT_TOKENS) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    """A text that shares no prefix with another number's."""
    return np.arange(number * tokens, (number + 1) * tokens, dtype=np.int32)


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
            text = text_of(number).tolist()
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
        text, mine = text_of(at), owner()
        holds.hold_text(mine, 1, text)
        assert holds.receive(mine, TEXT_TOKENS) is not None
        note("insert", partial(holds.insert, mine, TEXT_TOKENS))
        asked, other = np.append(text, np.int32(-1)), owner()
        note("match", partial(holds.hold_text, other, 1, asked))
        assert holds[other].hit_tokens == TEXT_TOKENS
        holds.release(other)
        note("delete", partial(core.delete, text, ""))
    return {name: spread(seconds) for name, seconds in told.items()}


def transfers(shape: str, layout: Layout, rounds: int) -> dict[str, object]:
    """A text to another process, beside one memcpy of as many bytes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.mempool.receiver", shape, folder]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as receiver,
            MemPool(layout, instance="sender") as pool,
        ):
            assert receiver.stdout is not None and receiver.stdin is not None
            receiver.stdout.readline()
            pool.connect(Path(folder) / "receiver")
            pool.memory[:] = 1  # every page has its memory: first touches are not what is timed
            told: dict[str, list[float]] = {"transfer": [], "memcpy": []}
            sent_bytes = 0
            for number in range(rounds):
                text = text_of(number, SENT_TOKENS).tolist()
                lease = pool.alloc_mem(tokens=SENT_TOKENS)
                rows = np.asarray([(a.group, a.page, a.page) for a in lease.addresses], np.int32)
                sent_bytes = sum(one.size_bytes for one in pieces_of(layout.groups, rows))
                pool.insert(text, lease)
                told["transfer"].append(timed(partial(pool.transfer_with_insert, "receiver", text)))
                source = pool.memory[:sent_bytes]
                target = pool.memory[-sent_bytes:]
                told["memcpy"].append(timed(partial(np.copyto, target, source)))
                pool.delete(text)
            single = [Piece(i * 65536, i * 65536, 65536) for i in range(sent_bytes // 65536)]
            half = len(pool.memory) // 2
            halves = pool.memory[:half], pool.memory[half:]
            by_piece = [timed(lambda: copy_pieces(single, *halves)) for _ in range(rounds)]
            receiver.stdin.close()
            receiver.wait(PATIENCE_SECONDS)
    ratios = [c / t for c, t in zip(told["memcpy"], told["transfer"], strict=True)]
    rates = {name: [sent_bytes / one / 1e9 for one in spent] for name, spent in told.items()}
    return {
        "sent_bytes": sent_bytes,
        "of_memcpy": spread(ratios, unit=1),
        "gb_per_second": spread(rates["transfer"], unit=1),
        "memcpy_gb_per_second": spread(rates["memcpy"], unit=1),
        "pieces_of_64KiB_gb_per_second": spread(
            [len(single) * 65536 / one / 1e9 for one in by_piece], unit=1
        ),
    }


def main() -> None:
    """Measure every shape and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, dict[str, object]] = {}
    for shape in SHAPES:
        layout = layout_of(read_shape(shape), POOL_BYTES)
        figures[shape] = {
            "holds_us": calls_of_holds(layout, options.rounds),
            "pool_us": calls_of_pool(layout, options.rounds),
            "transfer": transfers(shape, layout, options.rounds),
        }
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
