"""Kvell beside vLLM and transformers, or beside Kvell with other flags.  See README.md."""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.side_by_side import report
from bench.side_by_side.cases import CASES, Case, cases_of, reason_of, vllm_source
from bench.side_by_side.model_size import model_size
from bench.side_by_side.processes import SystemFailed
from bench.side_by_side.rounds import Results, alternated, joined
from bench.side_by_side.scenarios import Scenario, batches, prefill, served
from bench.side_by_side.systems import (
    System,
    kvell_server,
    offline_system,
    python_of,
    vllm_server,
)
from bench.side_by_side.vllm_environment import exported, vllm_python
from kvell.cli.terminal.environment import process_cache_dir
from kvell.errors import KvellError

KVELL_FLAGS = ["--kv-memory", "512MiB"]
COLUMNS = (
    *("system", "median", "spread", "first is", "of limit", "decode of limit"),
    *("TTFT ms", "TPOT ms"),
)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--systems",
        nargs="+",
        default=["kvell", "vllm", "transformers"],
        choices=("kvell", "vllm", "transformers", "generate-batch", "kvell-offline"),
    )
    parser.add_argument(
        "--kvell", action="append", default=[], metavar="NAME=FLAGS", help="another Kvell server"
    )
    parser.add_argument(
        "--tree",
        action="append",
        default=[],
        metavar="NAME=DIR FLAGS",
        help="the Kvell of another source tree, with a .venv of its own; FLAGS may be empty",
    )
    parser.add_argument("--vllm-flags", default="", help="such as '--enforce-eager'")
    parser.add_argument("--vllm-env", type=Path, default=process_cache_dir() / "vllm-env")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--models",
        nargs="+",
        help=f"several, one after the other: {', '.join(CASES)}, or what --model takes",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=1, help="times that all start afresh")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prefill-tokens", type=int, nargs="*", default=[2048])
    parser.add_argument("--workload", help="of `kvell bench workloads`, at --rate")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(given)


def scenarios_of(options: argparse.Namespace) -> list[Scenario]:
    """The scenarios asked for."""
    found = batches(options.batch, options.prompt_tokens, options.max_tokens)
    found += [prefill(tokens) for tokens in options.prefill_tokens]
    if options.workload:
        found.append(served(options.workload, options.rate, options.num_requests))
    return found


def starters(
    options: argparse.Namespace, case: Case, model: Path, logs: Path
) -> dict[str, Callable[[], System]]:
    """How each system is started; the first is compared with the others."""

    def vllm() -> System:
        python = vllm_python(options.vllm_env)
        weights = exported(model, process_cache_dir() / f"{model.name}-bfloat16")
        source, flags = vllm_source(case, weights)
        flags = (*flags, *shlex.split(options.vllm_flags))
        return vllm_server(python, source, logs / "vllm.log", flags)

    def library(engine: str) -> Callable[[], System]:
        return lambda: offline_system(engine, model, logs / f"{engine}.log")

    def kvell(name: str, flags: Sequence[str], *python: str) -> Callable[[], System]:
        given = [*KVELL_FLAGS, *case.kvell, *flags]
        return lambda: kvell_server(str(model), logs / f"{name}.log", given, *python)

    known: dict[str, Callable[[], System]] = {
        "kvell": kvell("kvell", []),
        "vllm": vllm,
        "kvell-offline": library("kvell"),
        "transformers": library("transformers"),
        "generate-batch": library("generate-batch"),
    }
    found = {name: known[name] for name in options.systems}
    for given in options.kvell:
        name, _, flags = given.partition("=")
        found[name] = kvell(name, shlex.split(flags))
    for given in options.tree:
        name, _, words = given.partition("=")
        directory, *flags = shlex.split(words)
        found[name] = kvell(name, flags, python_of(directory))
    return found


def started(
    waiting: dict[str, Callable[[], System]],
    first: Sequence[Scenario],
    refused: dict[str, str],
    ends: ExitStack,
    told: Callable[[str], None],
) -> dict[str, System]:
    """Systems that have answered the ``first`` scenarios and are paused; ``ends`` ends them.

    :param refused: gains those that did not start, and why.
    :raises SystemFailed: if the first one does not start.
    """
    systems: dict[str, System] = {}
    for name, start in waiting.items():
        told(f"starting {name}")
        try:
            system = start()
            ends.callback(system.process.end)
            for scenario in first:
                system.run(scenario, seed=0)
        except (SystemFailed, RuntimeError) as error:
            if not systems:
                raise
            refused[name] = reason_of(str(error))
            continue
        systems[name] = system
        system.process.pause()
    return systems


def measured(options: argparse.Namespace, case: Case, console: Console) -> dict[str, Any]:
    """Start all systems, run them in turn, end them; reports those that do not start, and why.

    :raises SystemFailed: if the first one does not start.
    """
    model = case.directory(process_cache_dir())
    scenarios, rooflines = scenarios_of(options), list[machine.Roofline]()
    refused = {name: why for name, why in case.unasked.items() if name in options.systems}
    parts: list[Results] = []
    with console.status("starting") as status, tempfile.TemporaryDirectory() as logs:
        waiting = starters(options, case, model, Path(logs))
        for start in range(options.starts):
            with ExitStack() as ends:
                for name in refused:
                    waiting.pop(name, None)
                # In another order each time: memory lies otherwise for who starts first.
                order = dict(list(waiting.items())[:: -1 if start % 2 else 1])
                systems = started(order, scenarios[:1], refused, ends, status.update)
                parts.append(
                    alternated(
                        systems,
                        scenarios,
                        options.rounds,
                        status.update,
                        lambda: rooflines.append(machine.measured_roofline(1)),
                        first=start * options.rounds,
                    )
                )
    results = joined(parts)
    roofline, size = machine.best_of(rooflines), model_size(model, four_bits=case.four_bits)
    return {
        "model": case.name,
        "refused": refused,
        "rounds": options.rounds * options.starts,
        "starts": options.starts,
        "machine": machine.describe(),
        "roofline": asdict(roofline),
        "middle_roofline": asdict(machine.middle_of(rooflines)),
        "flags": {"vllm": options.vllm_flags, **dict(f.split("=", 1) for f in options.kvell)},
        "scenarios": [
            report.summary(
                one, results[one.name], report.limit_of(one, size, roofline), options.starts
            )
            for one in scenarios
        ],
    }


def show(console: Console, found: dict[str, Any]) -> None:
    """Print tables to stdout."""
    roofline, middle = found["roofline"], found["middle_roofline"]
    console.print(
        f"{found['model']}: read {roofline['read_bytes_per_second'] / 1e9:.1f} GB/s "
        f"({middle['read_bytes_per_second'] / 1e9:.1f} in the middle of all moments), "
        f"GEMM {roofline['gemm_flops_per_second'] / 1e9:,.0f} GFLOP/s, "
        f"{found['machine']['threads']} threads, {found['rounds']} rounds"
    )
    for one in found["scenarios"]:
        table = Table(title=f"{one['scenario']}: {one['figure'].replace('_', ' ')}")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "system" else "right")
        for row in report.table_rows(one):
            table.add_row(*row)
        console.print(table)
    for name, why in found["refused"].items():
        console.print(f"{name}: not served: {why}")


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = arguments(given)
    made: list[dict[str, Any]] = []
    for case in cases_of(options.models or [options.model]):
        try:
            made.append(measured(options, case, Console(stderr=True)))
        except KvellError as error:
            print(error, file=sys.stderr)
            return 2
        show(Console(width=120), made[-1])
        if options.json:  # after each, so that what was measured is kept
            found = {"models": made} if options.models else made[0]
            result_file.write(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
