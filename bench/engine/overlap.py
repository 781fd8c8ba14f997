"""Steps planned in turn against steps planned ahead, while the previous one runs; alternated.

Both engines have the same weights (loaded twice) and get the same fresh random prompts; their
answers must be equal.  Tokens per second count output tokens over the whole call.  CPU seconds
are the process's own, so that neighbours on the machine do not count.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.llm import LLM

Prompts = list[list[int]]


@dataclass(frozen=True)
class Round:
    """One batch on both engines: output tokens per second, and CPU seconds per token."""

    in_turn: float
    ahead: float
    in_turn_cpu: float
    ahead_cpu: float


def timed(
    llm: LLM, prompts: Prompts, params: SamplingParams
) -> tuple[list[list[int]], float, float]:
    """Generate; return answers, wall seconds, CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    answers = [output.token_ids for output in llm.generate(prompts, params)]
    return answers, time.perf_counter() - wall, time.process_time() - cpu


def measure(
    engines: Sequence[LLM], batch: int, prompt_tokens: int, max_tokens: int, rounds: int
) -> list[Round]:
    """Rounds of one batch size; who goes first alternates."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    made: list[Round] = []
    for turn in range(rounds):
        draw = np.random.default_rng(1000 * batch + turn)
        prompts = draw.integers(10, 40_000, (batch, prompt_tokens)).tolist()
        order = (0, 1) if turn % 2 else (1, 0)
        found = {index: timed(engines[index], prompts, params) for index in order}
        if found[0][0] != found[1][0]:
            raise SystemExit(f"answers differ at batch {batch}, round {turn}")
        count = batch * max_tokens
        (_, wall, cpu), (_, wall_ahead, cpu_ahead) = found[0], found[1]
        made.append(Round(count / wall, count / wall_ahead, cpu / count, cpu_ahead / count))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--kv-memory-mib", type=int, default=256)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvell")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    engines = [
        LLM(
            options.model,
            kv_memory_bytes=options.kv_memory_mib << 20,
            cache_dir=options.cache_dir,
            async_scheduling=ahead,
        )
        for ahead in (False, True)
    ]
    for llm in engines:
        llm.generate([[11] * 16], SamplingParams(max_tokens=4))
    results = {
        batch: measure(engines, batch, options.prompt_tokens, options.max_tokens, options.rounds)
        for batch in options.batch
    }
    console, about = Console(width=110), machine.describe()
    console.print(about)
    console.print(table(results))
    if options.json:
        report = {str(b): [asdict(one) for one in made] for b, made in results.items()}
        result_file.write(options.json, {"machine": about, "rounds": report})


def table(results: dict[int, list[Round]]) -> Table:
    """Medians (best), and the median of the rounds' own ratios."""
    made = Table(title="output tokens/s: median (best)")
    for name in ("batch", "in turn", "ahead", "ahead ÷ in turn", "CPU: ahead ÷ in turn"):
        made.add_column(name, justify="right")
    for batch, rounds in results.items():
        rates = [[one.in_turn for one in rounds], [one.ahead for one in rounds]]
        cells = [f"{median(rate):.1f} ({max(rate):.1f})" for rate in rates]
        ratio = median(one.ahead / one.in_turn for one in rounds)
        cpu = median(one.ahead_cpu / one.in_turn_cpu for one in rounds)
        made.add_row(str(batch), *cells, f"{ratio:.3f}", f"{cpu:.3f}")
    return made


if __name__ == "__main__":
    main()
