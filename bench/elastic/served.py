"""Long prompts, then long answers, for real: KV cache and activations in one pool or two.

See README.md beside this file.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench import result_file
from bench.elastic.in_turn import alternated, tokens_of
from bench.elastic.narrow_models import NARROWER, SHAPES, narrow_model
from bench.elastic.step_parts import Shares, StepParts, shares_line
from kvell.calibration.rig import WatchedRunner
from kvell.clock import MonotonicClock
from kvell.device.host import CHUNK_BYTES
from kvell.engine.assembly import build_engine
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.options import EngineOptions
from kvell.memory import GroupKind, plan_layout, request_bytes
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB, RequestId

MAX_NUM_SEQS = 16


@dataclass(frozen=True)
class Load:
    """Requests that all wait at the start.

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
    parts: Shares | None = None


def options_of(model: PagedModel, load: Load) -> tuple[EngineOptions, EngineOptions]:
    """Options of static and elastic: the same memory, the same largest step."""
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
    """Submit unrelated prompts with answers of one length."""
    draw = np.random.default_rng(7)
    sampling = SamplingParams(temperature=0, max_tokens=load.output_tokens, ignore_eos=True)
    for index in range(load.requests):
        ids = draw.integers(3, vocab, load.prompt_tokens).astype("<i4").tobytes()
        engine.handle(Submit(RequestSpec(RequestId(str(index)), ids, sampling)))


class SideRun:
    """One side: its engine, and the time of its steps; other sides run in between."""

    def __init__(self, side: str, model: PagedModel, options: EngineOptions, load: Load) -> None:
        self._side, self._load, self._clock = side, load, MonotonicClock()
        self._engine = build_engine(model, side, options)
        self._watched = self._engine.runner = WatchedRunner(self._engine.runner)
        self._parts = StepParts(self._engine)
        submit(self._engine, load, model.description.vocab_size)
        self.answers: dict[str, list[int]] = {str(index): [] for index in range(load.requests)}
        self._seconds = self._decode_seconds = 0.0
        self._decode_tokens = self._decode_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether any answer is unfinished."""
        return self._engine.has_work()

    def step(self) -> None:
        """One step of its engine."""
        began_seconds = self._clock.now_seconds()
        for event in tokens_of(self._parts.step()):
            self.answers[event.request_id] += event.token_ids
        seconds = self._clock.now_seconds() - began_seconds
        self._seconds += seconds
        plan = self._watched.plan
        if plan is not None and plan.work and all(work.count == 1 for work in plan.work):
            self._decode_seconds += seconds
            self._decode_tokens += plan.num_tokens
            self._decode_steps += 1

    def figures(self) -> Figures:
        """What was measured."""
        stats, contract, load = self._engine.core.stats(), self._engine.contract, self._load
        tokens = load.requests * (load.prompt_tokens + load.output_tokens)
        return Figures(
            self._side,
            self._decode_tokens / max(1, self._decode_steps),
            self._decode_tokens / max(1e-9, self._decode_seconds),
            tokens / self._seconds,
            self._seconds,
            stats.preemptions,
            (contract.shared_bytes or contract.kv_pool_bytes) / MIB,
            contract.activation_reserve_bytes / MIB,
            stats.memory.get("mapped", 0),
            self._parts.shares(),
        )


def compare(name: str, load: Load) -> tuple[Figures, Figures, int]:
    """Run both sides of a shape; also returns how many requests they answered alike.

    :raises RuntimeError: if answers differ on a shape without states. A 16-bit state is rounded
        at the end of each step, and the two sides' steps end at different tokens.
    """
    models = [narrow_model(name), narrow_model(name)]
    chosen = zip(("static", "elastic"), models, options_of(models[0], load), strict=True)
    rigid, free = (SideRun(side, model, options, load) for side, model, options in chosen)
    alternated([rigid, free])
    alike = sum(rigid.answers[key] == free.answers[key] for key in rigid.answers)
    has_states = any(x.kind is GroupKind.STATE for x in models[0].description.layers)
    if alike < load.requests and not has_states:
        raise RuntimeError(f"{name}: the two sides answered {load.requests - alike} differently")
    return rigid.figures(), free.figures(), alike


def lines(name: str, load: Load, sides: Sequence[Figures]) -> list[str]:
    """The report as text."""
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
            + (f"; {shares_line(side.parts)}" if side.parts else "")
            for side in sides
        ),
    ]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--fits", type=float, help="requests whose KV fits; else the shape's own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    """Print both sides of every shape."""
    args = arguments()
    found = []
    for name in args.shapes:
        fits = args.fits or SHAPES[name].fits
        load = Load(args.prompt_tokens, args.output_tokens, args.requests, fits)
        *sides, alike = compare(name, load)
        print("\n".join(lines(name, load, sides)), flush=True)
        print(f"  {alike} of {load.requests} answered alike", flush=True)
        told = {"load": asdict(load), "alike": alike, "sides": [asdict(side) for side in sides]}
        found.append({"shape": name, **told})
        if args.json:
            result_file.write(args.json, {"shapes": found})


if __name__ == "__main__":
    main()
