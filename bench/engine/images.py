"""The gain from keeping an image's embeddings from one prefill chunk to the next.

Three ways to prefill prompts about images in chunks: the encoder runs in every chunk that
has tokens of the image (engines without an embedding cache; Jenga §7, fig. 18), once for
each image (embeddings wait in pages of their own, or where their keys and values will be),
or once for all requests about the same image (consumed embeddings stay cached in the pool).

Shapes are LLaVA-OneVision's with random weights, all widths of text and encoder divided by
the same number; images and chunks shrink alike: a chunk of 1,024 tokens is a seventh of an
image of 7,290.  One thread, in CPU seconds, so that neighbours do not count.
"""

from kvell.cli.terminal.environment import prepare_process
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.testing.accepting import is_accepted

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlavaOnevisionConfig

from bench import machine, result_file
from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.running.runner import Runner
from kvell.memory import Embeddings
from kvell.models.images.image_content import ImagePrompt
from kvell.models.images.image_store import ImageStore
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB, RequestId
from tests.models.random_model import random_paged_model

PIECE_PIXELS, PATCH_PIXELS = 112, 14
PLACEHOLDER = 4000
GRID = 3
"""Pieces in each direction; with the whole image ten, as for 1,152 × 1,152 pixels."""
SHAPES = {
    "7b": {"hidden": 3584, "inner": 18944, "layers": 28, "heads": 28, "kv": 4},
    "0.5b": {"hidden": 896, "inner": 4864, "layers": 24, "heads": 14, "kv": 2},
}
"""Of the text model; the encoder (1,152 wide, 26 layers) is the same for both."""


@dataclass(frozen=True)
class Way:
    """One way to serve: what is kept of an image, and where.

    :param shared: requests share the cache; else each has its own salt.
    """

    name: str
    every_chunk: bool = False
    embeddings: Embeddings = "own"
    shared: bool = False


WAYS = (
    Way("every chunk", every_chunk=True),
    Way("once, own pages"),
    Way("once, in KV pages", embeddings="in-kv"),
    Way("once for all", shared=True),
)


def config(shape: str, width: int, depth: int) -> LlavaOnevisionConfig:
    """The shape with widths divided by ``width`` and layers by ``depth``, a small vocabulary."""
    real = SHAPES[shape]
    head = 8 * max(1, round(real["hidden"] / real["heads"] / width / 8))
    edges = [PIECE_PIXELS * (i + 1) for i in range(GRID)]
    return LlavaOnevisionConfig(
        text_config={
            "model_type": "qwen2",
            "hidden_size": real["heads"] * head,
            "intermediate_size": real["inner"] // width,
            "num_hidden_layers": real["layers"] // depth,
            "num_attention_heads": real["heads"],
            "num_key_value_heads": real["kv"],
            "head_dim": head,
            "vocab_size": PLACEHOLDER + 1,
            "max_position_embeddings": 8192,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 1152 // width // 16 * 16,
            "intermediate_size": 4304 // width,
            "num_hidden_layers": 26 // depth,
            "num_attention_heads": 16,
            "image_size": PIECE_PIXELS,
            "patch_size": PATCH_PIXELS,
        },
        image_grid_pinpoints=[[height, width] for height in edges for width in edges],
        image_token_index=PLACEHOLDER,
        architectures=["LlavaOnevisionForConditionalGeneration"],
    )


class EveryChunk:
    """A runner that runs the encoder again in each later chunk with tokens of an image."""

    def __init__(self, runner: Runner, store: ImageStore) -> None:
        self._runner = runner
        self._store = store

    def run(self, plan: StepPlan) -> StepResult:
        """Run the encoder again and discard the result, which the pages already hold."""
        for work in plan.work:
            for start, tokens, _ in work.spec.images:
                if start < work.start < start + tokens:
                    self._store.encode(self._store.span(int(work.token_ids[0])))
        return self._runner.run(plan)


def prompts(store: ImageStore, options: argparse.Namespace) -> list[ImagePrompt]:
    """Questions about images, each image asked about ``--questions`` times."""
    draw = np.random.default_rng(0)
    pieces, side = GRID**2 + 1, GRID * PIECE_PIXELS
    told = []
    for index in range(options.requests):
        pixels = torch.randn(
            1,
            pieces,
            3,
            PIECE_PIXELS,
            PIECE_PIXELS,
            generator=torch.Generator().manual_seed(index // options.questions),
        )
        tensors = {"pixel_values": pixels, "image_sizes": torch.tensor([[side, side]])}
        [image] = store.family.read_images(tensors)
        before, after = (draw.integers(0, PLACEHOLDER, options.text_tokens) for _ in range(2))
        ids = np.concatenate([before, np.full(image.tokens, PLACEHOLDER), after])
        told.append(store.take(ids.astype(np.int32), tensors))
    return told


def engine_of(model: PagedModel, way: Way, options: argparse.Namespace) -> Engine:
    """A fresh engine over the model that serves this way."""
    engine = build_engine(
        model,
        "llava-onevision (random weights)",
        EngineOptions(
            kv_memory_bytes=options.kv_memory_mib * MIB,
            max_model_len=4096,
            max_num_batched_tokens=options.chunk_tokens,
            embeddings=way.embeddings,
        ),
    )
    assert engine.images is not None
    if way.every_chunk:
        engine.runner = EveryChunk(engine.runner, engine.images)
    return engine


def serve(
    engine: Engine, told: Sequence[ImagePrompt], way: Way, max_tokens: int, one_by_one: bool
) -> tuple[float, list[float], int]:
    """Serve all; return total seconds, seconds per request, and most bytes of used pages."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    commands = [
        Submit(
            RequestSpec(
                RequestId(f"r{i}"),
                p.token_ids.tobytes(),
                params,
                cache_salt="" if way.shared else str(i),
                images=p.images,
            )
        )
        for i, p in enumerate(told)
    ]
    started = time.process_time()
    begun, seconds, most_bytes = {}, [], 0
    strides = [group.page_stride_bytes for group in engine.core.memory.layout.groups]
    for batch in [[c] for c in commands] if one_by_one else [commands]:
        for command in batch:
            begun[command.request_id] = time.process_time()
            assert is_accepted(engine.handle(command))
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, Finished):
                    seconds.append(time.process_time() - begun[event.request_id])
            used = engine.core.memory.totals().used_pages
            most_bytes = max(most_bytes, sum(map(int.__mul__, used, strides)))
    return time.process_time() - started, seconds, most_bytes


def measure(model: PagedModel, way: Way, options: argparse.Namespace) -> dict[str, Any]:
    """One way: all requests at once, then one by one in a fresh engine."""
    figures: dict[str, Any] = {}
    for one_by_one in (False, True):
        engine = engine_of(model, way, options)
        assert engine.images is not None
        told = prompts(engine.images, options)
        runs = engine.images.encoder_runs
        whole, each, most_bytes = serve(engine, told, way, options.max_tokens, one_by_one)
        for prompt in told:
            engine.images.release(prompt)
        if one_by_one:
            figures["latency_seconds"] = round(statistics.mean(each), 4)
        else:
            figures["requests_per_second"] = round(len(told) / whole, 4)
            figures["encoder_runs"] = engine.images.encoder_runs - runs
            figures["most_used_bytes_between_steps"] = most_bytes
    return figures


def best_of(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The best of each way over the rounds, and how it compares with encoding in every chunk."""
    best: dict[str, dict[str, Any]] = {}
    for way in rounds[0]:
        runs = [one[way] for one in rounds]
        best[way] = runs[0] | {
            "requests_per_second": max(run["requests_per_second"] for run in runs),
            "latency_seconds": min(run["latency_seconds"] for run in runs),
        }
    slow = best[WAYS[0].name]
    for figures in best.values():
        throughput = figures["requests_per_second"] / slow["requests_per_second"]
        latency = slow["latency_seconds"] / figures["latency_seconds"]
        figures |= {"throughput_times": round(throughput, 2), "latency_times": round(latency, 2)}
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--width", type=int, default=4, help="divides all widths")
    parser.add_argument("--depth", type=int, default=4, help="divides the numbers of layers")
    parser.add_argument("--chunk-tokens", type=int, default=96)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--questions", type=int, default=2, help="about each image")
    parser.add_argument("--text-tokens", type=int, default=20, help="before and after an image")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--kv-memory-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {}
    for shape in options.shapes:
        model = random_paged_model(
            config(shape, options.width, options.depth),
            choose_kernels(torch.device("cpu")),
            dtype=torch.bfloat16,
            scale=4.0,
        )
        measure(model, WAYS[-1], options)  # nothing is measured while code and pages are new
        rounds = [
            {way.name: measure(model, way, options) for way in WAYS} for _ in range(options.rounds)
        ]
        results[shape] = best_of(rounds)
    about = machine.describe()
    console = Console(width=120)
    console.print(about)
    for shape, ways in results.items():
        console.print(_table(shape, ways))
    if options.json:
        named = {k: v for k, v in vars(options).items() if k != "json"}
        told = {"machine": about, "options": named, "results": results}
        result_file.write(options.json, told)


def _table(shape: str, ways: dict[str, dict[str, Any]]) -> Table:
    columns = ("requests_per_second", "throughput_times", "latency_seconds", "latency_times")
    table = Table(title=f"LLaVA-OneVision {shape}, scaled down")
    for name in ("encoder", *columns, "encoder_runs"):
        table.add_column(name, justify="right")
    for way, figures in ways.items():
        table.add_row(way, *(str(figures[column]) for column in (*columns, "encoder_runs")))
    return table


if __name__ == "__main__":
    main()
