"""Memory pressure beside vLLM's CPU server: the same shapes, weights, prompts and bytes for KV.

Run from the repository's root: ``python -m bench.engine.pressure.peers --vllm-env DIR``.  Requests
share nothing; prefix caching is off in vLLM, which does not support it for the hybrid.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.cost.shapes import TOKENIZER_FILES, VOCAB_SIZE
from bench.engine.pressure.cases import WANTED, Case, pressed_bytes
from bench.engine.pressure.small import CASES, config_of
from bench.side_by_side.processes import SystemFailed
from bench.side_by_side.report import summary
from bench.side_by_side.rounds import alternated
from bench.side_by_side.scenarios import Scenario
from bench.side_by_side.systems import System, kvell_server, vllm_server
from bench.side_by_side.vllm_environment import vllm_python
from kvell.cli.terminal.environment import process_cache_dir
from kvell.models.config.description import describe
from kvell.models.loading.random_weights import write_random_model
from kvell.models.sources.source import resolve_model
from kvell.simulator.traces.rows import TraceRow

RESULTS = result_file.path_of("pressure_peers")
LEAST = {"gemma3-27b": 1.0, "falcon-h1-7b": 1.3}
"""Output tokens per second, Kvell over vLLM."""
OUTPUT_TOKENS = 128
"""Output tokens of each request: more than in ``small``, since prefill counts here."""


@dataclass(frozen=True)
class Pressed(Scenario):
    """All requests of a case at once."""

    case: Case = CASES[0]

    def rows(self, seed: int) -> list[TraceRow]:
        """Requests with the case's lengths."""
        lengths = self.case.prompts(seed)
        return [TraceRow(0.0, tokens, self.case.output_tokens) for tokens in lengths]

    @property
    def is_rectangular(self) -> bool:
        """Always False: lengths differ."""
        return False

    @property
    def figure(self) -> str:
        """The name of the compared figure."""
        return "output_tokens_per_second"


def cases(names: Sequence[str]) -> list[Case]:
    """The cases that vLLM's CPU build runs, with long answers."""
    known = [case for case in CASES if case.shape in (names or LEAST)]
    return [replace(case, output_tokens=OUTPUT_TOKENS) for case in known]


def written(case: Case, directory: Path) -> Path:
    """Write the case's shape with random weights and SmolLM2's tokenizer."""
    config = config_of(case.shape)
    config.vocab_size = VOCAB_SIZE
    write_random_model(directory, config, seed=0, dtype=torch.bfloat16, scale=1.0)
    real = resolve_model("smollm2", process_cache_dir())
    for file in TOKENIZER_FILES:
        shutil.copy(real / file, directory / file)
    return directory


def starters(case: Case, model: Path, vllm: Path, logs: Path) -> dict[str, Callable[[], System]]:
    """How both servers are started: KV bytes that ``paged`` needs for a quarter of the requests."""
    kv_bytes = pressed_bytes(describe(config_of(case.shape), torch.bfloat16.itemsize).layers, case)
    same = ["--max-num-seqs", str(WANTED), "--max-model-len", str(case.most_tokens)]
    same += ["--max-num-batched-tokens", "512"]
    theirs = [*same, "--kv-cache-memory-bytes", str(kv_bytes), "--no-enable-prefix-caching"]
    return {
        "kvell": lambda: kvell_server(
            str(model), logs / "kvell.log", [*same, "--kv-memory", f"{kv_bytes}B"]
        ),
        "vllm": lambda: vllm_server(vllm, str(model), logs / "vllm.log", theirs),
    }


def measured(case: Case, vllm: Path, rounds: int, told: Callable[[str], None]) -> dict[str, Any]:
    """Measure both in turn; names a server that does not start."""
    with ExitStack() as ends:
        scratch = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        model, systems = written(case, scratch / case.shape), dict[str, System]()
        scenario = Pressed(f"{case.shape} pressed", case.requests, case=case)
        for name, start in starters(case, model, vllm, scratch).items():
            told(f"{case.shape}: starting {name}")
            try:
                systems[name] = start()
            except SystemFailed as refused:
                return {"shape": case.shape, "refused": {name: str(refused).splitlines()[-1]}}
            ends.callback(systems[name].process.end)
            systems[name].run(scenario, seed=1 << 20)
            systems[name].process.pause()
        results = alternated(systems, [scenario], rounds, told)
    return {"shape": case.shape, **summary(scenario, results[scenario.name], None)}


def table_of(found: Sequence[dict[str, Any]]) -> Table:
    """A row for each shape."""
    table = Table(title=f"a quarter of {WANTED} requests' memory: output tokens/s")
    for column in ("shape", "kvell", "vllm", "×", "wanted", "TTFT s", "TPOT ms"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for one in found:
        if "refused" in one:
            table.add_row(one["shape"], *(one["refused"].get(n, "") for n in ("kvell", "vllm")))
            continue
        ours, theirs = (one["systems"][name]["median"] for name in ("kvell", "vllm"))
        table.add_row(
            one["shape"],
            *(f"{each['output_tokens_per_second']:.0f}" for each in (ours, theirs)),
            f"{one['systems']['vllm']['ratio']:.2f}",
            f"{LEAST[one['shape']]:.1f}",
            f"{ours['ttft_p50_seconds']:.2f} / {theirs['ttft_p50_seconds']:.2f}",
            f"{ours['tpot_p50_seconds'] * 1e3:.1f} / {theirs['tpot_p50_seconds'] * 1e3:.1f}",
        )
    return table


def is_kept(one: dict[str, Any]) -> bool:
    """Whether a shape's bound is met."""
    return "refused" not in one and one["systems"]["vllm"]["ratio"] >= LEAST[one["shape"]]


def main(given: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-env", type=Path, default=process_cache_dir() / "vllm-env")
    parser.add_argument("--shapes", nargs="+", choices=tuple(LEAST), default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args(given)
    told, vllm = Console(stderr=True), vllm_python(options.vllm_env)
    found = [measured(case, vllm, options.rounds, told.print) for case in cases(options.shapes)]
    console = Console(width=120)
    console.print(machine.describe(), table_of(found))
    console.print("all bounds kept" if all(map(is_kept, found)) else "a bound is missed")
    report = {"machine": machine.describe(), "rounds": options.rounds, "cases": found}
    result_file.write(options.json, report)


if __name__ == "__main__":
    main()
