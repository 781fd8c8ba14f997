"""How many long requests decode at once in a small KV pool, by memory manager.

The shape is Gemma-3-270M's (18 layers: 15 sliding 512, 3 full; one KV head of 256)
with random weights.  The ideal is pool ÷ bytes of one request at full length.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import machine, result_file
from bench.cost.shapes import gemma3_270m
from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.memory import Manager
from kvell.models.loading.random_model import random_paged_model
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB, RequestId


def run(model: PagedModel, manager: Manager, options: argparse.Namespace) -> dict[str, Any]:
    """Run all requests at once through one engine; return its figures."""
    engine = build_engine(
        model,
        "gemma-3-270m (random weights)",
        EngineOptions(
            kv_memory_bytes=options.kv_memory_mib * MIB,
            max_model_len=options.prompt_tokens + options.max_tokens,
            max_num_batched_tokens=options.max_num_batched_tokens,
            manager=manager,
        ),
    )
    draw = np.random.default_rng(0)
    for index in range(options.requests):
        prompt = draw.integers(0, options.vocab_size, options.prompt_tokens).astype("<i4")
        params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
        engine.handle(Submit(RequestId(f"r{index}"), prompt.tobytes(), params))
    start = time.perf_counter()
    batches = drive(engine, options.requests, manager)
    return summary(engine, batches, time.perf_counter() - start, options)


def drive(engine: Engine, requests: int, manager: str) -> list[tuple[int, int]]:
    """(decoding, waiting) after the plan of each step, until all are finished."""
    batches: list[tuple[int, int]] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(manager, total=requests)
        while engine.has_work():
            events = engine.step()
            batches.append((engine.core.last_decoding, engine.core.num_waiting()))
            progress.advance(task, sum(isinstance(event, Finished) for event in events))
    return batches


def summary(
    engine: Engine, batches: Sequence[tuple[int, int]], seconds: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Figures of one run."""
    saturated = [decoding for decoding, waiting in batches if waiting]
    stats = engine.core.stats()
    total = options.requests * (options.prompt_tokens + options.max_tokens)
    return {
        "max_decoding": max(decoding for decoding, _ in batches),
        "mean_decoding_while_waiting": statistics.mean(saturated) if saturated else None,
        "steps": len(batches),
        "steps_while_waiting": len(saturated),
        "preemptions": stats.preemptions,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(total / seconds, 1),
        "rungs": stats.rungs,
    }


def ideal_requests(model: PagedModel, options: argparse.Namespace) -> float:
    """Pool ÷ bytes of one request at full length, each layer holding only tokens it may read."""
    length = options.prompt_tokens + options.max_tokens
    needed = sum(
        layer.token_bytes * min(length, layer.window_tokens - 1 if layer.window_tokens else length)
        for layer in model.description.layers
    )
    return float(options.kv_memory_mib * MIB / needed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-memory-mib", type=int, default=192)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=262144)
    parser.add_argument("--managers", nargs="+", default=["kvell", "paged"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    model = random_paged_model(
        gemma3_270m(options.vocab_size),
        choose_kernels(torch.device("cpu")),
        dtype=torch.bfloat16,
    )
    results = {manager: run(model, manager, options) for manager in options.managers}
    about = machine.describe()
    table = Table(title=f"ideal {ideal_requests(model, options):.1f} requests at full length")
    columns = ("max_decoding", "mean_decoding_while_waiting", "steps", "preemptions", "seconds")
    for name in ("manager", *columns):
        table.add_column(name, justify="right")
    for manager, figures in results.items():
        cells = [figures[column] for column in columns]
        table.add_row(manager, *(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells))
    console = Console(width=120)
    console.print(about)
    console.print(table)
    if options.json:
        result_file.write(options.json, {"machine": about, "results": results})


if __name__ == "__main__":
    main()
