"""CPU cost of the memory core: microseconds per request-step, match and insert.

Run from the repository's root: ``python -m bench.core.memory_core``.
"""

import argparse
import itertools
from pathlib import Path

from bench import machine, result_file
from bench.core.bounds import TABLES, Row, over_rounds, printed
from bench.core.trace import Replay, requests
from bench.core.workloads import (
    DECODE_STEPS,
    Decoding,
    Prefixes,
    core_of,
    longest_window,
    timed,
    timed_beside,
)
from bench.replay.shapes import SHAPES
from kvell.memory import EVICTIONS, Implementation
from kvell.simulator.replay.metered import MeteredCore
from kvell.vocabulary import GIB

CONTEXTS = {"1K": 1 << 10, "16K": 1 << 14, "128K": 1 << 17, "1M": 1 << 20}
POOLS = {"1GB": GIB, "16GB": 16 * GIB, "128GB": 128 * GIB, "1TB": 1024 * GIB}
BATCHES = (8, 64, 256)
BEHIND_BATCH = 64
YARDSTICK_SHAPE, YARDSTICK_BATCH = "llama3-8b", 32
PROMPTS = (4096, 131072)
PREFIX_POOL = 1024 * GIB
TRACE_POOL = 16 * GIB
PYTHON_SHAPES = ("llama3-8b", "gemma3-27b")
"""Shapes that the slow implementation is measured with, too."""
PYTHON_TOKENS = 1 << 22
"""Largest batch times context for the slow implementation: setting it up takes minutes."""
IMPLEMENTATIONS: tuple[Implementation, ...] = ("compiled", "python")


def shapes_of(implementation: Implementation) -> tuple[str, ...]:
    """All shapes; the few of :data:`PYTHON_SHAPES` for the slow implementation."""
    return SHAPES if implementation == "compiled" else PYTHON_SHAPES


def decode(args: argparse.Namespace, implementation: Implementation) -> list[Row]:
    """Pure decode, wherever shape, context and batch fit the pool, in rounds over all of them.

    A round makes every core anew, minutes after the one before: the memory that a core got and
    the machine's neighbours change so short a time by a fifth.
    """
    count = args.rounds if implementation == "compiled" else 1
    rounds = [decode_round(args, implementation) for _ in range(count)]
    return [over_rounds(rows) for rows in zip(*rounds, strict=True)]


def decode_round(args: argparse.Namespace, implementation: Implementation) -> list[Row]:
    """Measure every combination once."""
    rows = []
    yardstick = Decoding(
        core_of(YARDSTICK_SHAPE, GIB, implementation, args.eviction), 1024, YARDSTICK_BATCH
    )
    yardstick.prepare()
    for shape, pool, context, batch in itertools.product(
        shapes_of(implementation), POOLS, CONTEXTS, BATCHES
    ):
        if implementation == "python" and batch * CONTEXTS[context] > PYTHON_TOKENS:
            continue
        try:
            core = core_of(shape, POOLS[pool], implementation, args.eviction)
            work = Decoding(core, CONTEXTS[context], batch)
            times, lengths = timed_beside(work.run, yardstick.quiet, args.repeats, work.prepare)
            quiet = timed(work.quiet, args.repeats).figures(DECODE_STEPS * batch)
        except MemoryError:
            continue
        step = times.figures(DECODE_STEPS * batch)
        show(f"{implementation} decode {shape} {pool} {context} batch {batch}", step)
        row: Row = {"implementation": implementation, "shape": shape, "pool": pool}
        row |= {"context": context, "batch": batch, "step": step, "quiet": quiet}
        rows.append({**row, "yardsticks": lengths / batch})
    return rows


def behind(args: argparse.Namespace, implementation: Implementation) -> list[Row]:
    """Decode past the longest window, whose pages behind it are what the prefix resumes from."""
    rows = []
    for shape in shapes_of("compiled") if implementation == "compiled" else ():
        core = core_of(shape, PREFIX_POOL, implementation, args.eviction)
        if not (window := longest_window(core)):
            continue
        work = Decoding(core, window + window // 2, BEHIND_BATCH, window + DECODE_STEPS)
        step = timed(work.run, args.repeats, work.prepare).figures(DECODE_STEPS * BEHIND_BATCH)
        show(f"{implementation} behind {shape} window {window}", step)
        row: Row = {"implementation": implementation, "shape": shape, "batch": BEHIND_BATCH}
        rows.append({**row, "window_tokens": window, "step": step})
    return rows


def prefixes(args: argparse.Namespace, implementation: Implementation) -> list[Row]:
    """Measure match, hit and insert."""
    rows = []
    for shape, tokens in itertools.product(shapes_of(implementation), PROMPTS):
        work = Prefixes(
            core_of(shape, PREFIX_POOL, implementation, args.eviction), tokens, args.repeats
        )
        row: Row = {"implementation": implementation, "shape": shape, "tokens": tokens}
        row["matched_tokens"] = work.match()
        row["match"] = timed(work.match, args.repeats).figures()
        row["open_close"] = timed(work.hit, args.repeats).figures()
        row["insert"] = timed(work.insert, args.repeats, work.prepare_insert).figures()
        for name in ("match", "open_close", "insert"):
            show(f"{implementation} {name} {shape} {tokens} tokens", row[name])
        rows.append(row)
    return rows


def trace(args: argparse.Namespace, implementation: Implementation) -> list[Row]:
    """A whole trace over a pool that is too small for all who wait."""
    rows = []
    for shape in shapes_of(implementation):
        metered = MeteredCore(core_of(shape, TRACE_POOL, implementation, args.eviction))
        replay = Replay(metered, requests(args.requests))
        state = replay.run()
        row: Row = {
            "implementation": implementation,
            "shape": shape,
            "us_per_request_step": metered.nanoseconds / replay.request_steps / 1e3,
            "us_per_step": metered.nanoseconds / replay.steps / 1e3,
            "steps": replay.steps,
            "batch_mean": replay.request_steps / replay.steps,
            "preemptions": replay.preemptions,
            "hit_tokens": state.hit_tokens,
            "evicted_pages": list(state.evicted_pages),
        }
        print(f"{implementation} trace", row, flush=True)
        rows.append(row)
    return rows


def show(label: str, measured: Row) -> None:
    """One line of progress."""
    figures = f"{measured['best_us']:10.3f} best {measured['median_us']:10.3f} median us"
    print(f"{label:52} {figures}", flush=True)


def main() -> None:
    """Measure, print, and write what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--implementation", choices=("compiled", "python", "both"), default="both")
    parser.add_argument(
        "--part", choices=("decode", "behind", "prefixes", "trace", "all"), default="all"
    )
    parser.add_argument("--eviction", choices=EVICTIONS, default="lru")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="over all of `decode`")
    parser.add_argument("--requests", type=int, default=400, help="of the trace")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args()
    chosen = [one for one in IMPLEMENTATIONS if args.implementation in (one, "both")]
    parts = {"decode": decode, "behind": behind, "prefixes": prefixes, "trace": trace}
    report: Row = {"machine": machine.describe(), "repeats": args.repeats, "rounds": args.rounds}
    report["eviction"] = args.eviction
    print(report["machine"], flush=True)
    for name, measure in parts.items():
        if args.part in (name, "all"):
            report[name] = [row for one in chosen for row in measure(args, one)]
    report["bounds"] = {name: TABLES[name](report[name]) for name in parts if name in report}
    for name, table in report["bounds"].items():
        print(f"\n{name}\n{printed(table)}")
    if args.json:
        result_file.write(args.json, report)


if __name__ == "__main__":
    main()
