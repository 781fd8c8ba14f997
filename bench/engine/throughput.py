"""Kvell, transformers ``generate`` and transformers' continuous batching, side by side.

Every round gives each system the same fresh random prompts, so no prefix cache helps.
Tokens per second count output tokens over the whole call, prefill included.  ``--model`` may be a
shape of ``bench/cost/shapes`` too; ``--eager`` adds Kvell over transformers' own code.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.cost.shapes import NAMES, model_path
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.llm import LLM
from kvell.models.sources.source import resolve_model

Prompts = list[list[int]]
System = Callable[[Prompts, int], int]
"""Answers all prompts with exactly ``max_tokens`` tokens each; returns the tokens made."""


def kvell_system(
    model: str, dtype: str, cache_dir: Path, kv_bytes: int, *, eager: bool = False
) -> System:
    """Kvell as a library."""
    llm = LLM(
        model,
        kv_memory_bytes=kv_bytes,
        dtype=dtype,
        cache_dir=cache_dir,
        enforce_eager=eager,
    )

    def run(prompts: Prompts, max_tokens: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return sum(len(out.token_ids) for out in llm.generate(prompts, params))

    return run


def transformers_system(module: Any) -> System:
    """``model.generate`` over one rectangular batch."""

    def run(prompts: Prompts, max_tokens: int) -> int:
        ids = torch.tensor(prompts)
        made = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
        return int(made.shape[0] * (made.shape[1] - ids.shape[1]))

    return run


def continuous_batching_system(module: Any) -> System:
    """``model.generate_batch``: transformers' own paged engine."""
    from transformers import GenerationConfig

    def run(prompts: Prompts, max_tokens: int) -> int:
        config = GenerationConfig(
            max_new_tokens=max_tokens, eos_token_id=-1, pad_token_id=0, do_sample=False
        )
        made = module.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        return sum(len(out.generated_tokens) for out in made.values())

    return run


def load_module(path: Path, dtype: torch.dtype) -> Any:
    """Load the same weights with transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def measure(
    systems: dict[str, System], batch: int, prompt_tokens: int, max_tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Output tokens per second of every round; systems take turns."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds):
        draw = np.random.default_rng(1000 * batch + turn)
        prompts = draw.integers(10, 40_000, (batch, prompt_tokens)).tolist()
        for name, run in systems.items():
            start = time.perf_counter()
            made = run(prompts, max_tokens)
            seconds = time.perf_counter() - start
            if made != batch * max_tokens:
                raise SystemExit(f"{name} made {made} tokens, not {batch * max_tokens}")
            rates[name].append(made / seconds)
    return rates


def show(console: Console, results: dict[int, dict[str, list[float]]]) -> None:
    """Print medians (best), and each system as a multiple of transformers."""
    table = Table(title="output tokens/s: median (best); × transformers generate, by medians")
    names = list(next(iter(results.values())))
    for column in ("batch", *names, "ratio"):
        table.add_column(column, justify="right")
    for batch, rates in results.items():
        cells = [f"{statistics.median(r):.1f} ({max(r):.1f})" for r in rates.values()]
        table.add_row(str(batch), *cells, f"{ratio(rates):.2f}×")
    console.print(table)


def ratio(rates: dict[str, list[float]]) -> float:
    """Kvell over transformers ``generate``: the median of the rounds' own ratios."""
    pairs = zip(rates["kvell"], rates["transformers"], strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-memory-mib", type=int, default=512)
    parser.add_argument("--skip-continuous-batching", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvell")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    path = (
        model_path(options.model, options.cache_dir, options.cache_dir / "bench")
        if options.model in NAMES
        else resolve_model(options.model, options.cache_dir)
    )
    module = load_module(path, getattr(torch, options.dtype))
    ours = (str(path), options.dtype, options.cache_dir, options.kv_memory_mib << 20)
    systems = {
        "kvell": kvell_system(*ours),
        "transformers": transformers_system(module),
    }
    if options.eager:
        systems["kvell eager"] = kvell_system(*ours, eager=True)
    if not options.skip_continuous_batching:
        systems["continuous batching"] = continuous_batching_system(module)
    for run in systems.values():
        run([[11] * 16], 4)
    results = {
        batch: measure(systems, batch, options.prompt_tokens, options.max_tokens, options.rounds)
        for batch in options.batch
    }
    console, about = Console(width=120), machine.describe()
    console.print(about)
    show(console, results)
    if options.json:
        report = {
            "machine": about,
            "tokens_per_second": results,
            "ratio": {batch: ratio(rates) for batch, rates in results.items()},
        }
        result_file.write(options.json, report)


if __name__ == "__main__":
    main()
