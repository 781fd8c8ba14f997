"""A team that gives way to neighbours against one that goes as if alone: quiet, and beside one.

The neighbour is a plain loop in another process, free to run on any processor.  Both engines have
the same weights (loaded twice) and get the same fresh random prompts; their answers must be equal.
Quiet and disturbed rounds alternate, and so does who goes first.  Rates are output tokens per
second over the whole call, or prompt tokens per second for ``prompt``.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.busy_program import busy_program
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.llm import LLM

GIVES_WAY, AS_IF_ALONE = "gives way", "as if alone"


@dataclass(frozen=True)
class Case:
    """One kind of step."""

    name: str
    batch: int
    prompt_tokens: int
    max_tokens: int

    @property
    def counted(self) -> int:
        """Prompt tokens where one token is made, else output tokens."""
        return self.batch * (self.prompt_tokens if self.max_tokens == 1 else self.max_tokens)


@dataclass(frozen=True)
class Rate:
    """Tokens per second of one call."""

    case: str
    engine: str
    beside: bool
    tokens_per_second: float


def timed(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], float]:
    """Answers, and the seconds of the call."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    began = time.perf_counter()
    answers = [output.token_ids for output in llm.generate(prompts, params)]
    return answers, time.perf_counter() - began


def measured(
    engines: dict[str, LLM], cases: Sequence[Case], seed: int, *, beside: bool
) -> list[Rate]:
    """One round of all cases on all engines."""
    found = []
    for index, case in enumerate(cases):
        draw = np.random.default_rng([seed, index, beside])
        prompts = draw.integers(10, 40_000, (case.batch, case.prompt_tokens)).tolist()
        names = list(engines) if (seed + index) % 2 else list(engines)[::-1]
        answers = []
        for name in names:
            said, seconds = timed(engines[name], prompts, case.max_tokens)
            answers.append(said)
            found.append(Rate(case.name, name, beside, case.counted / seconds))
        if answers[0] != answers[1]:
            raise SystemExit(f"answers differ: {case.name}, round {seed}, beside: {beside}")
    return found


def rounds_of(engines: dict[str, LLM], cases: Sequence[Case], rounds: int) -> list[Rate]:
    """Quiet and disturbed rounds in turn."""
    found: list[Rate] = []
    for seed in range(rounds):
        found += measured(engines, cases, seed, beside=False)
        with busy_program():
            found += measured(engines, cases, seed, beside=True)
    return found


def table(rates: Sequence[Rate], cases: Sequence[Case]) -> Table:
    """Medians with their ranges, and shares of the quiet median of the team as if alone."""
    made = Table(title="tokens/s: median (range), share of quiet as if alone")
    for name in ("case", "engine", "quiet", "beside a busy program"):
        made.add_column(name, justify="left" if name == "engine" else "right")
    for case in cases:
        whole = median(_of(rates, case, AS_IF_ALONE, beside=False))
        for engine in (GIVES_WAY, AS_IF_ALONE):
            cells = [_cell(_of(rates, case, engine, beside=b), whole) for b in (False, True)]
            made.add_row(case.name, engine, *cells)
    return made


def _of(rates: Sequence[Rate], case: Case, engine: str, *, beside: bool) -> list[float]:
    key = (case.name, engine, beside)
    return [one.tokens_per_second for one in rates if (one.case, one.engine, one.beside) == key]


def _cell(rates: list[float], whole: float) -> str:
    middle = median(rates)
    return f"{middle:,.1f} ({min(rates):,.1f}–{max(rates):,.1f})  {middle / whole:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of the case `prompt`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-memory-mib", type=int, default=256)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvell")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    engines = {
        name: LLM(
            options.model,
            kv_memory_bytes=options.kv_memory_mib << 20,
            cache_dir=options.cache_dir,
            threads=threads,
        )
        for name, threads in ((GIVES_WAY, None), (AS_IF_ALONE, len(os.sched_getaffinity(0))))
    }
    cases = [Case(f"batch {batch}", batch, 16, options.max_tokens) for batch in options.batch]
    cases.append(Case("prompt", 1, options.prompt_tokens, 1))
    for llm in engines.values():
        llm.generate([[11] * 16], SamplingParams(max_tokens=4))
    rates = rounds_of(engines, cases, options.rounds)
    console, about = Console(width=120), machine.describe()
    console.print(about)
    console.print(table(rates, cases))
    if options.json:
        result_file.write(options.json, {"machine": about, "rates": [asdict(one) for one in rates]})


if __name__ == "__main__":
    main()
