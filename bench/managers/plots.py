"""Waste, batch and hit rate over time and by manager, as figures 15 to 17 of the Jenga paper.

Run from the repository's root: ``python -m bench.managers.plots``; ``--quick`` takes few
requests.  It replays what the paper's figures show (generated traces, Ministral's shape), reads
the cells of ``bench/results/virtual/managers.json`` for the bars, and writes pictures and a page of
their figures to ``bench/results``.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import result_file
from bench.managers.cells import OURS, SHAPES
from bench.managers.ours import replayed
from bench.managers.pictures import Points, bars, lines
from bench.replay.shapes import ELEMENT_BYTES, read_shape
from kvell.cli.replay.command import replay_limits
from kvell.clock import MonotonicClock
from kvell.memory import Manager, create_core, plan_layout
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import DEFAULT_HARDWARE, load_profile
from kvell.simulator.replay.replay import Replay
from kvell.simulator.replay.runner import Machine
from kvell.simulator.report.plot import draw
from kvell.simulator.report.shares import Run, mean_parts
from kvell.simulator.report.timeline import Timeline
from kvell.simulator.traces.generators import generate_trace
from kvell.vocabulary import GIB

RESULTS = result_file.RESULTS
MATRIX, PAGE = result_file.path_of("managers", result_file.VIRTUAL), RESULTS / "managers.md"
SHAPE, MEMORY_GIB, REQUESTS = "ministral-8b", 40, 20
TRACES = ("ministral-static", "ministral-dynamic")
MANAGERS: tuple[Manager, ...] = ("kvell", "jenga", "paged", "max-page", "static")
SHOWN: tuple[tuple[str, Manager], ...] = (
    ("ministral-dynamic", "kvell"),
    ("ministral-dynamic", "paged"),
)
"""Runs whose memory is drawn."""
ARTICLES = (1, 2, 3, 4, 6, 8, 12, 20)
OF_ARTICLES: tuple[Manager, ...] = ("kvell", "paged")
"""Managers whose hits by number of articles are shown, as in the paper."""
QUESTIONS = 5
HITS_MEMORY_GIB = 60
RUNNING = {"one at a time": 1, "all wait at the start": 256}
"""Requests of the questions about articles that may run at once."""
BARS_SIZE = 8
ONE = dict[str, Any]
Hits = dict[str, dict[str, Points]]
"""Running → manager → (articles, hit rate)."""


@dataclass(frozen=True)
class Timed:
    """One replay: its report, and its memory over time."""

    report: ONE
    run: Run


def over_time(trace: str, manager: Manager, requests: int) -> Timed:
    """Replay a generated trace on Ministral's shape."""
    timeline, rows = Timeline(), generate_trace(trace, requests)
    replay = replayed(read_shape(SHAPE), rows, MEMORY_GIB * GIB, manager, timeline=timeline)
    return Timed(replay.report(), Run(f"{manager}, {trace}", timeline.moments))


def batches(run: Run) -> Points:
    """Requests running, by step."""
    return [(moment.step, moment.running) for moment in run.moments]


def hits(manager: Manager, articles: int, running: int) -> ONE:
    """Replay questions about ``articles`` articles, in random order, on Ministral's shape.

    :param running: requests at once at most; with one, the cache alone makes the difference.
    """
    shape, rows = read_shape(SHAPE), generate_trace("arxiv-qa", articles * QUESTIONS)
    layout = plan_layout(shape.description.layers, HITS_MEMORY_GIB * GIB, manager=manager)
    limits = replay_limits(layout, shape.description.max_model_len)
    limits = replace(limits, max_num_seqs=running)
    machine = Machine(
        load_profile(DEFAULT_HARDWARE), model_cost(shape.config, shape.description, ELEMENT_BYTES)
    )
    layers, core = shape.description.layers, create_core(layout)
    run = Replay(core, layers, limits, rows, "start", machine, MonotonicClock(), sessions=False)
    run.run()
    return run.report()


def by_manager(matrix: ONE, trace: str) -> dict[str, dict[str, dict[str, float]]]:
    """Batch as a part of ``paged``'s, waste and hit rate of one trace's cells, for the bars."""
    names = matrix["figures"]
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for shape in SHAPES:
        found = {
            manager: dict(zip(names, figures, strict=False))
            for manager in OURS
            if isinstance(
                figures := matrix["by_cell"].get(f"{shape}.{trace}.{BARS_SIZE}.{manager}"), list
            )
        }
        if "paged" not in found:
            continue
        paged = found["paged"]["batch_mean"]
        for manager, one in found.items():
            values = {
                "batch, of paged's": one["batch_mean"] / paged,
                "waste": one["waste"],
                "hit rate": one["hit_rate"],
            }
            for title, value in values.items():
                panels.setdefault(title, {}).setdefault(shape, {})[manager] = value
    return {title: panel for title, panel in panels.items() if _says_something(panel)}


def _says_something(panel: Mapping[str, Mapping[str, float]]) -> bool:
    return any(value for one in panel.values() for value in one.values())


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of the page."""
    lined = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lined) + "\n"


def time_table(runs: Mapping[tuple[str, Manager], Timed]) -> str:
    """Figures of the replays over time."""
    rows = []
    for (trace, manager), one in runs.items():
        report, parts = one.report, mean_parts(one.run.moments)
        figures = (f"{report['batch_mean']:.2f}", str(report["steps"]))
        shares = (f"{report['waste']:.2%}", f"{report['stranded']:.2%}", f"{parts[0]:.1%}")
        rows.append((trace, manager, *figures, *shares))
    return table(("trace", "manager", "batch", "steps", "waste", "stranded", "needed"), rows)


def hits_table(found: Hits) -> str:
    """Hit rates by number of articles."""
    any_points = next(iter(next(iter(found.values())).values()))
    rows = [
        (title, manager, *(f"{rate:.3f}" for _, rate in points))
        for title, by_manager in found.items()
        for manager, points in by_manager.items()
    ]
    return table(("running", "manager", *(f"{count:.0f}" for count, _ in any_points)), rows)


TEXT = f"""# Managers side by side

Written by `python -m bench.managers.plots`. Batch and memory over time and by manager; the cells
behind the bars are those of [managers.json](virtual/managers.json)
(`python -m bench.managers.matrix --traces DIR`), and what vLLM's manager takes beside ours is in
[managers_peers.json](zen5/managers_peers.json). What the words mean:
[simulator](../../src/kvell/simulator/README.md), [managers](../managers/README.md).

## Batch over time

{SHAPE}, {MEMORY_GIB} GiB, {REQUESTS} requests of 55 to 110 thousand tokens that all wait at the
start (figure 15 of the paper); *dynamic*: the same, growing along the trace.

![batch over time](managers_batch.png)

"""


def page(runs: str, hit_rates: str, traces: Sequence[str]) -> str:
    """The page of results."""
    bars_of = "\n\n".join(f"![{trace}](managers_{trace}.png)" for trace in traces)
    bars_text = (
        f"\n## By manager\n\nMemory of {BARS_SIZE} mean requests; all requests wait at the start."
        f"\n\n{bars_of}\n"
    )
    return (
        TEXT
        + runs
        + "\n## Memory over time\n\nThe growing requests (figure 16): what is needed, held without "
        "being needed, stranded, cached.\n\n![memory over time](managers_memory.png)\n\n"
        f"## Hits by number of articles\n\n{SHAPE}, {HITS_MEMORY_GIB} GiB, {QUESTIONS} questions "
        "about each article of 60 to 120 thousand tokens, in random order (figure 17).\n\n"
        "![hits](managers_hits.png)\n\n" + hit_rates + (bars_text if traces else "")
    )


def main() -> None:
    """Replay, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few requests and articles")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the pictures")
    args = parser.parse_args()
    requests, articles = (6, ARTICLES[:3]) if args.quick else (REQUESTS, ARTICLES)
    args.out.mkdir(parents=True, exist_ok=True)

    runs = {
        (trace, manager): over_time(trace, manager, requests)
        for trace in TRACES
        for manager in MANAGERS
    }
    panels: dict[str, dict[str, Points]] = {
        trace: {name: batches(runs[trace, name].run) for name in MANAGERS} for trace in TRACES
    }
    batch = lines(panels, "step", "requests running", steps=True)
    (args.out / "managers_batch.png").write_bytes(batch)
    draw([runs[one].run for one in SHOWN], args.out / "managers_memory.png")

    found: Hits = {
        title: {
            name: [(count, hits(name, count, running)["hit_rate"]) for count in articles]
            for name in OF_ARTICLES
        }
        for title, running in RUNNING.items()
    }
    picture = lines(found, "articles", "hit rate")
    (args.out / "managers_hits.png").write_bytes(picture)

    traces = []
    matrix = json.loads(MATRIX.read_text()) if MATRIX.exists() else {"figures": [], "by_cell": {}}
    for trace in ("azure-2023-conv", "azure-2023-code", "mooncake-conversation"):
        if panel := by_manager(matrix, trace):
            (args.out / f"managers_{trace}.png").write_bytes(bars(panel))
            traces.append(trace)
    text = page(time_table(runs), hits_table(found), traces)
    (args.out / PAGE.name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
