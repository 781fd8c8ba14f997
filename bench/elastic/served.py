"""Long prompts, then long answers, for real: one pool for KV cache and activations, or two?

See README.md beside this file.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.replay.shapes import read_shape
from kvell.attention.choice import choose_kernels
from kvell.calibration.rig import WatchedRunner
from kvell.clock import MonotonicClock
from kvell.device.host import CHUNK_BYTES
from kvell.engine.assembly import build_engine
from kvell.engine.engine import Engine
from kvell.engine.options import EngineOptions
from kvell.engine.protocol import Finished, Submit, Tokens
from kvell.engine.sampling_params import SamplingParams
from kvell.memory import plan_layout, request_bytes
from kvell.models.lean.decoder import lean_decoder
from kvell.models.loading import describe_as
from kvell.models.paged_model import PagedModel
from kvell.models.random_weights import random_module
from kvell.vocabulary import MIB, RequestId

SHAPES = ("llama3-8b", "ministral-8b")
NARROWER = 8
"""Widths and vocabulary are divided by it; layers, and so KV beside activations, stay."""
WINDOW_TOKENS = 2048
"""Of sliding layers: prompts are a sixteenth of the paper's, so is the window."""
MAX_NUM_SEQS = 16


@dataclass(frozen=True)
class Load:
    """Requests that are all there at the start.

    :param fits: requests for whose KV there is memory, if activations take none of it.
    """

    prompt_tokens: int
    output_tokens: int
    requests: int
    fits: float


@dataclass(frozen=True)
class Figures:
    """One side of one shape."""

    side: str
    batch_decoding: float
    decode_tokens_per_second: float
    total_tokens_per_second: float
    seconds: float
    preemptions: int
    pool_mib: float
    reserve_mib: float
    chunks_mapped: int = 0


def narrow_config(name: str) -> Any:
    """A shape of ``bench/configs`` that two cores can compute."""
    config = read_shape(name).config
    for field in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        setattr(config, field, getattr(config, field) // NARROWER)
    config.num_key_value_heads = max(1, config.num_key_value_heads // NARROWER)
    config.max_position_embeddings = 16_384
    if getattr(config, "sliding_window", None):
        config.sliding_window = WINDOW_TOKENS
    return config


def narrow_model(name: str) -> PagedModel:
    """Random weights in bfloat16, computed by the compiled pass."""
    module = random_module(narrow_config(name), 3, torch.bfloat16, 8.0)
    kernels = choose_kernels(torch.device("cpu"))
    description = describe_as(module.config, module.dtype, module.dtype)
    decoder = lean_decoder(module, description, kernels)
    if decoder is None:
        raise RuntimeError("there is no compiled pass on this machine")
    return PagedModel(module, description, kernels, lean=decoder)


def options_of(model: PagedModel, load: Load) -> tuple[EngineOptions, EngineOptions]:
    """Static, elastic: the same memory, the same largest step."""
    longest = load.prompt_tokens + load.output_tokens + 1
    one_bytes = request_bytes(plan_layout(model.description.layers, 1 << 30), longest)
    bound_bytes = int(load.fits * one_bytes) // CHUNK_BYTES * CHUNK_BYTES
    reserve_bytes = model.activations.need_bytes(load.prompt_tokens, MAX_NUM_SEQS)
    common = EngineOptions(
        max_model_len=longest,
        max_num_batched_tokens=load.prompt_tokens,
        max_num_seqs=MAX_NUM_SEQS,
    )
    return (
        replace(common, kv_memory_bytes=bound_bytes - reserve_bytes),
        replace(common, memory_bytes=model.weight_bytes + bound_bytes),
    )


def submit(engine: Engine, load: Load, vocab: int) -> None:
    """Unrelated prompts; answers of one length."""
    draw = np.random.default_rng(7)
    sampling = SamplingParams(temperature=0, max_tokens=load.output_tokens, ignore_eos=True)
    for index in range(load.requests):
        ids = draw.integers(3, vocab, load.prompt_tokens).astype("<i4").tobytes()
        engine.handle(Submit(RequestId(str(index)), ids, sampling))


def run(
    side: str, model: PagedModel, options: EngineOptions, load: Load
) -> tuple[Figures, dict[str, list[int]]]:
    """All requests on one side; what was measured, and the answers."""
    engine, clock = build_engine(model, side, options), MonotonicClock()
    watched = engine.runner = WatchedRunner(engine.runner)
    submit(engine, load, model.description.vocab_size)
    answers: dict[str, list[int]] = {str(index): [] for index in range(load.requests)}
    decode_seconds, decode_tokens, decode_steps = 0.0, 0, 0
    began = clock.now_seconds()
    while engine.has_work():
        before = clock.now_seconds()
        for event in engine.step():
            if isinstance(event, Tokens):
                answers[event.request_id] += event.token_ids
            if isinstance(event, Finished) and event.reason != "length":
                raise RuntimeError(f"a request ended with {event.reason}: {event.message}")
        plan = watched.plan
        if plan is not None and plan.work and all(work.count == 1 for work in plan.work):
            decode_seconds += clock.now_seconds() - before
            decode_tokens += plan.num_tokens
            decode_steps += 1
    seconds = clock.now_seconds() - began
    stats, contract = engine.core.stats(), engine.contract
    tokens = load.requests * (load.prompt_tokens + load.output_tokens)
    figures = Figures(
        side,
        decode_tokens / max(1, decode_steps),
        decode_tokens / max(1e-9, decode_seconds),
        tokens / seconds,
        seconds,
        stats.preemptions,
        (contract.shared_bytes or contract.kv_pool_bytes) / MIB,
        contract.activation_reserve_bytes / MIB,
        stats.memory.get("mapped", 0),
    )
    return figures, answers


def compare(name: str, load: Load) -> tuple[Figures, Figures]:
    """Both sides of a shape, whose answers must be the same."""
    model = narrow_model(name)
    static, elastic = options_of(model, load)
    rigid, told = run("static", model, static, load)
    free, told_again = run("elastic", model, elastic, load)
    if told != told_again:
        raise RuntimeError(f"{name}: the two sides answered differently")
    return rigid, free


def lines(name: str, load: Load, sides: Sequence[Figures]) -> list[str]:
    """For people."""
    rigid, free = sides
    return [
        f"{name} / {NARROWER}, {load.requests} requests of {load.prompt_tokens:,} + "
        f"{load.output_tokens:,} tokens, KV of {load.fits:g}: "
        f"batch {free.batch_decoding / rigid.batch_decoding:.2f}x, "
        f"decode {free.decode_tokens_per_second / rigid.decode_tokens_per_second:.2f}x, "
        f"total {free.total_tokens_per_second / rigid.total_tokens_per_second:.2f}x",
        *(
            f"  {side.side:8} batch {side.batch_decoding:5.2f}, decode "
            f"{side.decode_tokens_per_second:6.1f}/s, total {side.total_tokens_per_second:6.0f}/s "
            f"in {side.seconds:.0f} s, pool {side.pool_mib:.0f} MiB, reserve "
            f"{side.reserve_mib:.0f} MiB, {side.preemptions} preemptions, "
            f"{side.chunks_mapped} chunks mapped"
            for side in sides
        ),
    ]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, choices=SHAPES)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--fits", type=float, default=3.3, help="requests whose KV fits")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    """Prints both sides of every shape."""
    args = arguments()
    load = Load(args.prompt_tokens, args.output_tokens, args.requests, args.fits)
    found = []
    for name in args.shapes:
        sides = compare(name, load)
        print("\n".join(lines(name, load, sides)), flush=True)
        found.append({"shape": name, "sides": [asdict(side) for side in sides]})
    if args.json:
        args.json.write_text(json.dumps({"load": asdict(load), "shapes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
