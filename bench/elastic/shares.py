"""Shares of a step's time that scheduling and mapping memory take, on SmolLM2 or a larger model.

See README.md beside this file.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench import machine, result_file
from bench.elastic.in_turn import tokens_of
from bench.elastic.narrow_models import random_model
from bench.elastic.step_parts import Shares, StepParts, shares_line
from bench.replay.shapes import read_shape
from kvell.device.host import CHUNK_BYTES
from kvell.engine.assembly import build_engine, load_model
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.options import EngineOptions
from kvell.models.paged_model import PagedModel
from kvell.models.sources.progress import quiet
from kvell.models.sources.source import resolve_model
from kvell.vocabulary import MIB, RequestId

SIDES = ("static", "shared pool", "with a buffer")
MAX_MODEL_LEN = 2_048
BUFFER_BYTES = 64 * MIB
NEVER_LATE_SECONDS = 1e3
"""Objectives that are checked at every step and never missed."""


@dataclass(frozen=True)
class Load:
    """``batch`` requests at a time, twice as many in all.

    :param prompt_tokens: shortest, longest.
    """

    batch: int
    prompt_tokens: tuple[int, int]
    output_tokens: int


def options_of(model: PagedModel, load: Load, kv_bytes: int) -> dict[str, EngineOptions]:
    """Options of each side, with the same memory beside weights."""
    common = EngineOptions(max_model_len=MAX_MODEL_LEN, max_num_seqs=load.batch)
    reserve_bytes = model.activations.need_bytes(common.max_num_batched_tokens, load.batch)
    both = model.weight_bytes + (kv_bytes + reserve_bytes) // CHUNK_BYTES * CHUNK_BYTES
    shared = replace(common, memory_bytes=both)
    buffered = replace(
        shared,
        cpu_buffer_bytes=BUFFER_BYTES,
        slo_ttft_seconds=NEVER_LATE_SECONDS,
        slo_tpot_seconds=NEVER_LATE_SECONDS,
    )
    sides = (replace(common, kv_memory_bytes=kv_bytes), shared, buffered)
    return dict(zip(SIDES, sides, strict=True))


def submit(engine: Engine, load: Load, vocab: int) -> None:
    """Submit unrelated prompts with answers of one length."""
    draw = np.random.default_rng(3)
    sampling = SamplingParams(temperature=0, max_tokens=load.output_tokens, ignore_eos=True)
    for index in range(2 * load.batch):
        ids = draw.integers(3, vocab, draw.integers(*load.prompt_tokens)).astype("<i4").tobytes()
        engine.handle(Submit(RequestId(str(index)), ids, sampling))


def measured(model: PagedModel, load: Load, kv_bytes: int) -> dict[str, Shares]:
    """Run all sides, one after the other, since they share a model."""
    found = {}
    for side, options in options_of(model, load, kv_bytes).items():
        engine = build_engine(model, side, options)
        submit(engine, load, model.description.vocab_size)
        parts = StepParts(engine)
        while engine.has_work():
            list(tokens_of(parts.step()))
        found[side] = parts.shares()
    return found


def model_of(options: argparse.Namespace) -> PagedModel:
    """The packaged model, or random weights in a real model's shape."""
    if options.shape:
        return random_model(read_shape(options.shape).config)
    return load_model(resolve_model(options.model, options.cache_dir), "bfloat16", "cpu", quiet)


def main() -> None:
    """Print all sides of every batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", metavar="NAME", help="a config of bench/configs instead")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[100, 900])
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--kv-memory-mib", type=int, default=512)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache/kvell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    model, name = model_of(options), options.shape or options.model
    found = []
    for batch in options.batches:
        load = Load(batch, tuple(options.prompt_tokens), options.output_tokens)
        sides = measured(model, load, options.kv_memory_mib * MIB)
        print(f"{name}, {batch} at a time", flush=True)
        for side, shares in sides.items():
            print(f"  {side:14} {shares_line(shares)}", flush=True)
        found.append(asdict(load) | {side: asdict(one) for side, one in sides.items()})
    read_gbs = machine.read_bandwidth_gb_per_second()
    print(f"reads at {read_gbs:.0f} GB/s")
    if options.json:
        told = {"model": name, "read_gbs": read_gbs, "loads": found}
        result_file.write(options.json, told)


if __name__ == "__main__":
    main()
