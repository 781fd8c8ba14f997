"""What do other sizes of the large page give, where the least common multiple is too large?

Run from the repository's root: ``python -m bench.managers.large_pages --traces DIR``.  Each shape
whose pages are padded is replayed with the size that pads no page by more than 1 %, with the
smallest that pads none by more than 5 %, and with the one that :mod:`kvell.pages.large_page`
chooses, in memory for eight requests.  Hits of a full pool are lumpy, so figures are means over
five sizes of memory, ±2 %.
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.managers.cells import SHAPES, TRACES
from bench.managers.matrix import Setting, bytes_of, rows_of, shape_of
from bench.managers.ours import replayed
from kvell.errors import ChangeSomething
from kvell.memory import Layout, MemoryCore, create_core, plan_layout
from kvell.pages.large_page import LITTLE_PADDING, MAX_PADDING, padded_sizes
from kvell.vocabulary import MIB

RESULTS = Path("bench", "results", "managers_large_pages.json")
SIZE = 8
"""Memory, in mean requests."""
FACTORS = (0.98, 0.99, 1.0, 1.01, 1.02)
"""Of that memory."""
LOOK_EVERY = 16
"""Steps between two looks at what pages are used for."""


@dataclass(frozen=True)
class Case:
    """A shape, a trace, and a size of the large page."""

    shape: str
    trace: str
    rule: str
    large_page_bytes: int


@dataclass(frozen=True)
class Figures:
    """One replay, or means of several."""

    steps: float
    hit_rate: float
    waste: float
    stranded: float


def choices(layout: Layout) -> dict[str, int]:
    """Sizes of the large page by what chose them; each size once."""
    pages = [-(-group.page_bytes // 64) * 64 for group in layout.groups]
    cap = max(layout.large_page_bytes, layout.pool_bytes // 64)
    found = {"chosen": layout.large_page_bytes}
    for name, most in (("1 %", LITTLE_PADDING), ("5 %", MAX_PADDING)):
        size = next(padded_sizes(pages, cap, most), 0)
        if size and size not in found.values():
            found[name] = size
    return found


def replay(traces: Path, job: tuple[Case, float]) -> Figures | None:
    """One case in one size of memory; None if a request is refused there."""
    case, factor = job
    setting = Setting(traces, None, None)
    shape, rows = shape_of(case.shape), rows_of(setting, case.trace)
    memory = int(bytes_of(setting, case.shape, case.trace, SIZE) * factor)

    def core_of(_: Layout) -> MemoryCore:
        layers, size = shape.description.layers, case.large_page_bytes
        return create_core(plan_layout(layers, memory, large_page_bytes=size))

    try:
        run = replayed(shape, rows, memory, "kvell", core_of=core_of, look_every=LOOK_EVERY)
    except ChangeSomething:
        return None
    report = run.report()
    if report["requests_refused"]:
        return None
    return Figures(report["steps"], report["hit_rate"], report["waste"], report["stranded"])


def mean(figures: Sequence[Figures]) -> Figures:
    """Of one replay or more."""
    rows = [asdict(one) for one in figures]
    return Figures(**{name: statistics.mean(row[name] for row in rows) for name in rows[0]})


def table(found: dict[Case, Figures]) -> Table:
    """A row for each case."""
    title = f"sizes of the large page: means of memory for {SIZE}, ±{FACTORS[-1] - 1:.0%}"
    printed = Table("shape", "trace", "size by", title=title)
    for column in ("MiB", "steps", "of chosen's", "hits", "waste", "stranded"):
        printed.add_column(column, justify="right")
    for case, one in found.items():
        chosen = next(
            figures
            for other, figures in found.items()
            if (other.shape, other.trace, other.rule) == (case.shape, case.trace, "chosen")
        )
        printed.add_row(
            *(case.shape, case.trace, case.rule, f"{case.large_page_bytes / MIB:.2f}"),
            *(f"{one.steps:.1f}", f"{one.steps / chosen.steps:.4f}", f"{one.hit_rate:.4f}"),
            *(f"{one.waste:.4f}", f"{one.stranded:.4f}"),
        )
    return printed


def main() -> None:
    """Replays every case, prints and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="only these")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args()
    setting = Setting(options.traces, None, None)
    cases = [
        Case(name, trace, rule, size)
        for name in options.shapes
        for trace in TRACES
        for layout in (
            plan_layout(shape_of(name).description.layers, bytes_of(setting, name, trace, SIZE)),
        )
        if layout.sizing_rule == "padded"
        for rule, size in choices(layout).items()
    ]
    jobs = [(case, factor) for case in cases for factor in FACTORS]
    told: dict[Case, list[Figures]] = {case: [] for case in cases}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        replays = pool.map(partial(replay, options.traces), jobs)
        shown = track(replays, "sizes", len(jobs), console=Console(stderr=True))
        for (case, _), figures in zip(jobs, shown, strict=True):
            if figures is not None:
                told[case].append(figures)
    found = {case: mean(each) for case, each in told.items() if each}
    Console(width=140).print(table(found))
    facts = [asdict(case) | asdict(one) for case, one in found.items()]
    options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
