"""What the memory core costs: microseconds per request-step, match and insert.

Run from the repository's root: ``python -m bench.core.memory_core``.
"""

import argparse
import itertools
import json
import platform
from pathlib import Path
from typing import Any

from bench.core.trace import Replay, Stopwatch, requests
from bench.core.workloads import DECODE_STEPS, MODELS, Decoding, Prefixes, core_of, timed
from kvell.memory import Implementation
from kvell.vocabulary import GIB

CONTEXTS = {"1K": 1 << 10, "16K": 1 << 14, "128K": 1 << 17, "1M": 1 << 20}
POOLS = {"1GB": GIB, "16GB": 16 * GIB, "128GB": 128 * GIB, "1TB": 1024 * GIB}
BATCHES = (8, 64, 256)
PROMPTS = (4096, 131072)
TRACE_POOL = 16 * GIB
PYTHON_TOKENS = 1 << 24
"""Batch times context that the slow implementation is asked to set up."""
IMPLEMENTATIONS: tuple[Implementation, ...] = ("compiled", "python")
Row = dict[str, Any]


def decode(args: argparse.Namespace, implementation: Implementation) -> list[Row]:
    """Pure decode, wherever model, context and batch fit the pool."""
    rows = []
    for model, pool, context, batch in itertools.product(MODELS, POOLS, CONTEXTS, BATCHES):
        if implementation == "python" and batch * CONTEXTS[context] > PYTHON_TOKENS:
            continue
        try:
            core = core_of(model, POOLS[pool], implementation)
            work = Decoding(core, CONTEXTS[context], batch, args.repeats)
            step = timed(work.run, args.repeats).figures(DECODE_STEPS * batch)
            quiet = timed(work.quiet, args.repeats).figures(DECODE_STEPS * batch)
        except MemoryError:
            continue
        label = f"{implementation} decode {model} {pool} {context} batch {batch}"
        show(label, step, "per request-step", quiet)
        row: Row = {"implementation": implementation, "model": model, "pool": pool}
        rows.append({**row, "context": context, "batch": batch, "step": step, "quiet": quiet})
    return rows


def prefixes(args: argparse.Namespace, implementation: Implementation) -> list[Row]:
    """Match, hit and insert."""
    rows = []
    for model in MODELS:
        for tokens in PROMPTS:
            work = Prefixes(core_of(model, 1024 * GIB, implementation), tokens, args.repeats)
            row: Row = {"implementation": implementation, "model": model, "tokens": tokens}
            row["match"] = timed(work.match, args.repeats).figures()
            row["open_close"] = timed(work.hit, args.repeats).figures()
            row["insert"] = timed(work.insert, args.repeats, work.prepare_insert).figures()
            for name in ("match", "open_close", "insert"):
                show(f"{implementation} {name} {model} {tokens} tokens", row[name], "a call")
            rows.append(row)
    return rows


def trace(args: argparse.Namespace, implementation: Implementation) -> list[Row]:
    """A whole trace over a pool that is too small for all who wait."""
    rows = []
    for model in MODELS:
        watch = Stopwatch(core_of(model, TRACE_POOL, implementation))
        replay = Replay(watch, requests(args.requests))
        state = replay.run()
        row: Row = {
            "implementation": implementation,
            "model": model,
            "us_per_request_step": watch.seconds / replay.request_steps * 1e6,
            "us_per_step": watch.seconds / replay.steps * 1e6,
            "steps": replay.steps,
            "batch_mean": replay.request_steps / replay.steps,
            "preemptions": replay.preemptions,
            "hit_tokens": state.hit_tokens,
            "evicted_pages": list(state.evicted_pages),
        }
        print(f"{implementation} trace", row, flush=True)
        rows.append(row)
    return rows


def show(label: str, measured: Row, unit: str, quiet: Row | None = None) -> None:
    """One line of the report."""
    text = f"{measured['best_us']:10.3f} best {measured['median_us']:10.3f} median us {unit}"
    extra = f"; nothing new: {quiet['best_us']:.4f}" if quiet else ""
    print(f"{label:52} {text}{extra}", flush=True)


def main() -> None:
    """Measure, print, and write what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--implementation", choices=("compiled", "python", "both"), default="both")
    parser.add_argument("--part", choices=("decode", "prefixes", "trace", "all"), default="all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=400, help="of the trace")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args()
    chosen = [one for one in IMPLEMENTATIONS if args.implementation in (one, "both")]
    parts = {"decode": decode, "prefixes": prefixes, "trace": trace}
    report: Row = {"machine": platform.processor() or platform.machine(), "repeats": args.repeats}
    for name, measure in parts.items():
        if args.part in (name, "all"):
            report[name] = [row for one in chosen for row in measure(args, one)]
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
