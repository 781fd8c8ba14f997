"""Replay in virtual time against the real server, under the same Poisson load.

It does what a user would, for three shapes and three rates, five times in turn: ``kvell
calibrate``, then the same traces to ``kvell replay --hardware`` and, by ``kvell bench serve``, to
``kvell serve``.  Each round's replay is held against the same round's server, since the speed of a
shared machine changes by the minute: times to the first token, per token, end to end, throughput
and the mean number of requests in flight.  The miss is the median over the rounds; the server's own
spread is shown beside it.  Rates are parts of the throughput that a first replay predicts.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import machine, result_file
from bench.cost.shapes import NAMES, VOCAB_SIZE, model_path
from kvell.calibration.serving import server
from kvell.load.arrivals import retime
from kvell.models.sources.progress import Progress
from kvell.simulator.traces.distributions import independent, parse_distribution
from kvell.simulator.traces.trace import write_trace

PARTS = (0.3, 0.55, 0.8)
"""Rates, in parts of the throughput with all requests waiting."""
PROMPTS, OUTPUTS = "lognormal:200:150", "lognormal:48:30"
BOUND, MOST = 0.10, 0.20
"""A relative miss up to the first always counts as kept; one above the second never does."""
STEP_TOKENS, STEP_SEQS = 2048, 256

Figures = dict[str, float]


def kvell(*words: str) -> Any:
    """Run ``kvell`` with these words and return the JSON that it prints."""
    command = [sys.executable, "-m", "kvell.cli.main", *words]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"kvell {' '.join(words)} ended with {found.returncode}")
    return json.loads(found.stdout)


def figures(report: dict[str, Any]) -> Figures:
    """Figures that are compared; ``in_flight`` is the mean number of requests (Little's law)."""
    seconds = report["duration_seconds"]
    return {
        "ttft_seconds_p50": report["ttft_seconds"]["p50"],
        "ttft_seconds_mean": report["ttft_seconds"]["mean"],
        "tpot_seconds_p50": report["tpot_seconds"]["p50"],
        "e2e_seconds_mean": report["e2e_seconds"]["mean"],
        "output_tokens_per_second": report["output_tokens"] / seconds,
        "in_flight": report["completed"] * report["e2e_seconds"]["mean"] / seconds,
    }


def compared(replays: Sequence[Figures], servers: Sequence[Figures]) -> dict[str, dict[str, Any]]:
    """Each figure, round by round: replayed, served, the median miss, the server's spread."""
    found = {}
    for name in replays[0]:
        ours, seen = [one[name] for one in replays], [one[name] for one in servers]
        spread = (max(seen) - min(seen)) / median(seen)
        misses = [mine / real - 1 for mine, real in zip(ours, seen, strict=True)]
        allowed = max(BOUND, min(MOST, 2 * spread))
        found[name] = {
            "replay": median(ours),
            "server": median(seen),
            "replay_rounds": ours,
            "server_rounds": seen,
            "miss": median(misses),
            "spread": spread,
            "kept": abs(median(misses)) <= allowed,
        }
    return found


class Case:
    """One shape: its calibration, its server, its traces."""

    def __init__(self, model: Path, directory: Path, options: argparse.Namespace) -> None:
        self.model, self._directory, self._options = model, directory, options
        self._memory = f"{options.kv_memory_mib}MiB"
        directory.mkdir(parents=True, exist_ok=True)
        self._calibration = directory / "calibration.json"

    def calibrate(self) -> Any:
        """Run ``kvell calibrate``, with ``--quick`` unless ``--whole`` was given."""
        flags = [] if self._options.whole else ["--quick"]
        where = ("--kv-memory", self._memory, "--out", str(self._calibration), "--json")
        return kvell("calibrate", "--model", str(self.model), *where, *flags)

    def trace(self, rate: float, seed: int) -> Path:
        """Poisson arrivals, unrelated prompts; ``inf`` lets all come at once."""
        prompts = parse_distribution(PROMPTS, "prompts")
        outputs = parse_distribution(OUTPUTS, "outputs")
        draw = np.random.default_rng(seed)
        rows = independent(prompts, outputs, draw, self._options.num_requests)
        path = self._directory / f"rate-{rate:.4g}.jsonl"
        write_trace(path, retime(rows, rate=rate, seed=seed))
        return path

    def replay(self, trace: Path) -> Any:
        """Run ``kvell replay`` with the server's limits."""
        limits = ("--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", str(STEP_SEQS))
        where = ("--kv-memory", self._memory, "--hardware", str(self._calibration))
        what = ("--trace", str(trace), "--arrivals", "trace", "--model", str(self.model))
        return kvell("replay", *what, *where, *limits, "--json")

    def serve_command(self) -> list[str]:
        """The command line of ``kvell serve`` on a free port."""
        program = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json"]
        limits = ["--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", str(STEP_SEQS)]
        return [*program, "--model", str(self.model), "--kv-memory", self._memory, *limits]

    def load(self, url: str, trace: Path, turn: int) -> Any:
        """Run ``kvell bench serve``; a salt keeps rounds from hitting each other's prefixes."""
        salt = json.dumps({"cache_salt": f"{trace.stem}-{turn}"})
        to = ("--base-url", url, "--trace", str(trace), "--vocab-size", str(VOCAB_SIZE))
        return kvell("bench", "serve", *to, "--extra-body", salt, "--json")


def measured(case: Case, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """All rates of one shape."""
    progress("calibrating", 0.0)
    calibrations = [case.calibrate()]
    at_once = case.replay(case.trace(float("inf"), options.seed))
    most = at_once["completed"] / at_once["duration_seconds"]
    rates = [part * most for part in options.parts]
    traces = [case.trace(rate, options.seed) for rate in rates]
    replays: list[list[Figures]] = [[] for _ in rates]
    servers: list[list[Figures]] = [[] for _ in rates]
    with server(case.serve_command()) as url:
        case.load(url, traces[-1], -1)  # connections, code: not counted
        for turn in range(options.rounds):
            progress(f"round {turn + 1}", turn / options.rounds)
            if turn:
                calibrations.append(case.calibrate())
            for place, trace in enumerate(traces):
                replays[place].append(figures(case.replay(trace)))
                report = case.load(url, trace, turn)
                if report["failed"]:
                    raise SystemExit(f"the server failed: {report['failures']}")
                servers[place].append(figures(report))
    return {
        "calibrations": calibrations,
        "most_requests_per_second": most,
        "rates": [
            {"rate": rate, "part": part, "figures": compared(*both)}
            for rate, part, both in zip(
                rates, options.parts, zip(replays, servers, strict=True), strict=True
            )
        ],
    }


def show(shapes: dict[str, Any]) -> None:
    """A row for each shape, rate and figure."""
    from kvell.cli.terminal.figures import wide_console
    from kvell.cli.terminal.tables import made_table

    rows = [
        (
            f"{name}, {at['rate']:.2f}/s, {figure}",
            f"{one['replay']:.4g}",
            f"{one['server']:.4g}",
            f"{one['miss']:+.1%}",
            f"{one['spread']:.1%}",
            "yes" if one["kept"] else "no",
        )
        for name, shape in shapes.items()
        for at in shape["rates"]
        for figure, one in at["figures"].items()
    ]
    headers = ("figure", "replay", "server", "miss", "server's spread", "kept")
    wide_console().print(made_table("virtual against real time", headers, rows))


def median_misses(shapes: dict[str, Any]) -> dict[str, float]:
    """The median miss of each figure, over all shapes and rates."""
    cells = [at["figures"] for shape in shapes.values() for at in shape["rates"]]
    return {name: median(abs(cell[name]["miss"]) for cell in cells) for name in cells[0]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--parts", type=float, nargs="+", default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-requests", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one shape, two rounds, 12 requests")
    parser.add_argument("--whole", action="store_true", help="calibrate on all points, not few")
    parser.add_argument("--kv-memory-mib", type=int, default=512)
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "kvell")
    parser.add_argument("--work-dir", type=Path, default=Path("build") / "bench-models")
    parser.add_argument("--json", type=Path, default=result_file.path_of("replay_vs_server"))
    options = parser.parse_args(arguments)
    if options.quick:
        options.shapes, options.rounds, options.num_requests = options.shapes[:1], 2, 12
    from kvell.cli.terminal.progress import progress_bar

    shapes: dict[str, Any] = {}
    for name in options.shapes:
        with progress_bar(name) as progress:
            path = model_path(name, options.cache_dir, options.work_dir, progress)
            case = Case(path, options.work_dir / "traces" / name, options)
            shapes[name] = measured(case, options, progress)
        show(shapes)
    report = {
        "machine": machine.describe(),
        "quick": options.quick,
        "rounds": options.rounds,
        "num_requests": options.num_requests,
        "prompts": PROMPTS,
        "outputs": OUTPUTS,
        "median_misses": median_misses(shapes),
        "shapes": shapes,
    }
    print({name: f"{miss:.1%}" for name, miss in report["median_misses"].items()})
    result_file.write(options.json, report)


if __name__ == "__main__":
    main()
