"""Check and time everything of Kvell that runs on a GPU; see README.md."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from bench import result_file
from bench.gpu import contract, engine, speed
from bench.gpu.timing import copy_bandwidth, read_bandwidth
from kvell.attention.triton.backend import TritonKernels

DECODE_SIZES = ((8, 2048), (32, 4096))
LLAMA_SIZES = ((1, 2048), (1, 32_768), (8, 2048), (8, 8192), (32, 2048), (32, 8192), (64, 4096))
PREFILL_SIZES = ((1, 2048), (4, 4096), (1, 16_384))
GOAL = 0.8
"""Part of the memory bandwidth that decode at batch 8 and 2K tokens must reach."""


def worker(part: int, of: int) -> None:
    """Run every ``of``-th check, and compile every ``of``-th kernel for the timings."""
    rows = engine.checks(torch.device("cuda")) if part == 0 else contract.run(part - 1, of - 1)
    kernels = TritonKernels()
    for heads in (*speed.DECODES, *speed.PREFILLS)[part::of]:
        speed.decode(kernels, heads, 1, 256)
        speed.prefill(kernels, heads, 1, 64, alone=True)
    for row in rows:
        print(json.dumps(row), flush=True)


def correctness(workers: int) -> list[dict[str, Any]]:
    """All checks, in processes side by side; a process that dies is a failed check."""
    command = [sys.executable, "-m", "bench.gpu.check", "--worker"]
    running = [
        subprocess.Popen(
            [*command, str(part), str(workers)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for part in range(workers)
    ]
    rows: list[dict[str, Any]] = []
    for part, process in enumerate(running):
        out, errors = process.communicate()
        rows += [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
        if process.returncode:
            said = errors.decode()[-1500:]
            rows.append({"check": f"process {part}", "ok": False, "said": said})
    return rows


def timings() -> Iterator[dict[str, Any]]:
    """Rows of figures, the bandwidth of the same run first."""
    yield {"kind": "memory", "copy": copy_bandwidth(), "read": read_bandwidth()}
    kernels = TritonKernels()
    for heads in speed.DECODES:
        for requests, context in LLAMA_SIZES if heads is speed.LLAMA else DECODE_SIZES:
            yield speed.decode(kernels, heads, requests, context)
    for heads in speed.PREFILLS:
        for requests, context in PREFILL_SIZES:
            yield speed.prefill(kernels, heads, requests, context)
    for new in (17, 256, 2048):
        yield speed.short_chunk(kernels, speed.LLAMA, 1, 16_384, new)
    yield speed.copying()
    yield engine.throughput(torch.device("cuda"))


def line(row: dict[str, Any], read: float) -> str:
    """A row of figures as text."""
    kind = row["kind"]
    if kind == "memory":
        return f"memory: copy {row['copy'] / 1e9:.0f} GB/s, read {row['read'] / 1e9:.0f} GB/s"
    if kind == "decode":
        return (
            f"decode   {row['heads']:20} {row['requests']:3} x {row['context']:6}"
            f" {row['microseconds']:8.1f} us {row['bytes_per_second'] / 1e9:6.0f} GB/s"
            f" = {row['bytes_per_second'] / read:4.0%} of read"
            f"  ({row['microseconds_with_launches']:.0f} us with launches)"
        )
    if kind == "engine":
        return (
            f"engine   llama of 8 layers, {row['requests']} x {row['prompt']}:"
            f" prefill {row['prefill_tokens_per_second']:.0f} tokens/s,"
            f" decode {row['decode_tokens_per_second']:.0f} tokens/s,"
            f" {row['decode_step_seconds'] * 1e3:.1f} ms a step"
        )
    if kind == "copy":
        return f"copy     pages of {row['page_bytes']}: {row['bytes_per_second'] / 1e9:.0f} GB/s"
    peers = "  ".join(
        f"{name} {value / 1e12:.0f}"
        for name, value in row.items()
        if name.startswith(("sdpa", "flash_")) and name != "flops_per_second"
    )
    new = row.get("new", row["context"])
    return (
        f"{kind:8} {row['heads']:20} {row['requests']:3} x {row['context']:6}, {new} new:"
        f" {row['flops_per_second'] / 1e12:.0f} TFLOP/s  {peers}"
    )


def goal_met(rows: list[dict[str, Any]]) -> bool:
    """Whether decode of the plain shape reaches :data:`GOAL` of the bandwidth."""
    read = next(row["read"] for row in rows if row["kind"] == "memory")
    reached = [
        row["bytes_per_second"] / read
        for row in rows
        if row["kind"] == "decode" and row["heads"] == speed.LLAMA.name and row["requests"] >= 8
    ]
    return min(reached, default=0.0) >= GOAL


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file for checks and figures")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--only", choices=("checks", "timings"))
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU that torch can use: nothing was checked")
        return 2
    if options.worker:
        worker(*options.worker)
        return 0
    begin = time.monotonic()
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    print("  ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    rows = [] if options.only == "timings" else correctness(max(2, options.workers))
    failed = [row for row in rows if not row["ok"]]
    for row in failed:
        print(f"FAILED {row['check']}: {row['said']}")
    print(f"{len(rows) - len(failed)} of {len(rows)} checks hold", flush=True)
    figures: list[dict[str, Any]] = []
    for row in () if options.only == "checks" else timings():
        figures.append(row)
        print(line(row, figures[0]["read"]), flush=True)
    if figures:
        print(f"goal of {GOAL:.0%} on decode {'met' if goal_met(figures) else 'missed'}")
    took = time.monotonic() - begin
    print(f"{took:.0f} s")
    if options.out:
        said = {"machine": machine, "seconds": took, "checks": rows, "figures": figures}
        result_file.write(options.out, said, processor=machine["gpu"])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
