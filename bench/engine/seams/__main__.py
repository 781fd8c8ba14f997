"""Time that a served step loses between its last operator and the next step's first (the seam).

A real server at batch 32, streaming over HTTP: the front in its own process, the instance in
another, whose loop is watched.  Every other forward pass calls callbacks that do nothing at each
layer, so their cost is that of neighbouring steps of one run.

The loop's own clock excludes time that other processes on its cores took, the front included.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.engine.seams.recorder import Record
from bench.engine.seams.timeline import Step, callbacks_cost, medians, rounds_of
from bench.side_by_side.driving import drive, figures_of
from bench.side_by_side.processes import SystemProcess
from bench.side_by_side.scenarios import Scenario
from kvell.models.config.quantization import QUANTIZATIONS

RESULTS = result_file.path_of("seams")
MOST_SHARE = 0.05
"""Most part of a step's wall time that the seam may take."""
MOST_CALLBACKS = 0.02


def served(options: argparse.Namespace, directory: Path) -> Record:
    """Run rounds against a fresh server; return the record of its instance."""
    path, log = directory / "record.json", directory / "log"
    command = [sys.executable, "-m", "bench.engine.seams.watched_server", options.model]
    command += [options.quantization, str(options.kv_memory_mib), str(path)]
    command += ["ahead"] if options.async_scheduling else []
    process = SystemProcess(command, log, {}, talks=True)
    try:
        url = json.loads(process.hear())["url"]
        scenario = Scenario("seams", options.batch, options.prompt_tokens, options.max_tokens)
        for turn in range(options.rounds):
            figures_of(drive(url, scenario, turn))
    finally:
        process.end()
    if not path.exists():
        raise process.failed("the instance left no record")
    return Record.read(path)


def figures(steps: Sequence[Step]) -> dict[str, Any]:
    """Figures of one round."""
    return {
        "steps": len(steps),
        "share": median(step.share for step in steps),
        "own_share": median(step.own_share for step in steps),
        "step_seconds": median(step.operators + step.seam for step in steps),
        "seam_seconds": median(step.seam for step in steps),
        "own_seam_seconds": median(step.own_seam for step in steps),
        "stages_seconds": medians(steps),
        "callbacks_cost": callbacks_cost(steps),
    }


def over_rounds(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure over the rounds; of stages each stage's."""
    found: dict[str, Any] = {}
    for name, first in rounds[0].items():
        values = [one[name] for one in rounds]
        if isinstance(first, dict):
            stages = sorted({stage for value in values for stage in value})
            found[name] = {s: median(value.get(s, 0.0) for value in values) for s in stages}
        else:
            found[name] = median(values)
    return found


def verdicts(middle: dict[str, Any]) -> dict[str, bool]:
    """The bounds, and whether each is kept."""
    return {
        f"seam at most {MOST_SHARE:.0%} of a step": middle["share"] <= MOST_SHARE,
        f"callbacks at most {MOST_CALLBACKS:.0%}": middle["callbacks_cost"] <= MOST_CALLBACKS,
    }


def timeline(middle: dict[str, Any]) -> Table:
    """Where a seam's time goes, the longest part first."""
    step = middle["step_seconds"]
    table = Table(title=f"between two steps of {step * 1e3:.2f} ms: medians")
    for name in ("stage", "µs", "of the step"):
        table.add_column(name, justify="left" if name == "stage" else "right")
    stages = sorted(middle["stages_seconds"].items(), key=lambda item: -item[1])
    for stage, seconds in stages:
        table.add_row(stage, f"{seconds * 1e6:.0f}", f"{seconds / step:.2%}")
    table.add_row("all", f"{middle['seam_seconds'] * 1e6:.0f}", f"{middle['share']:.2%}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-memory-mib", type=int, default=512)
    parser.add_argument(
        "--async-scheduling",
        action="store_true",
        help="plan steps ahead; the seam is then that of the thread that computes, and stages of "
        "the loop's thread beside it count where they fall into it",
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        record = served(options, Path(directory))
    rounds = [figures(steps) for steps in rounds_of(record, options.batch)]
    if not rounds:
        raise SystemExit(f"the server never decoded {options.batch} requests together for long")
    middle, about, console = over_rounds(rounds), machine.describe(), Console(width=110)
    console.print(about)
    console.print(timeline(middle))
    shares = ", ".join(f"{one['share']:.1%}" for one in rounds)
    own = f"{middle['own_seam_seconds'] * 1e6:.0f} µs, {middle['own_share']:.1%}"
    console.print(f"seam by round: {shares}; by the loop's own clock {own}")
    console.print(f"callbacks that do nothing: {middle['callbacks_cost']:+.2%}")
    for verdict, holds in verdicts(middle).items():
        console.print(f"{verdict}: {'yes' if holds else 'no'}")
    report = {"machine": about, "batch": options.batch, "median": middle, "rounds": rounds}
    result_file.write(options.json, report | {"verdicts": verdicts(middle)})


if __name__ == "__main__":
    main()
