"""Whether a comparison that Kvell loses in the matrix is real, or luck of the memory size.

Run from the repository's root: ``python -m bench.managers.luck --traces DIR``.  In a full pool one
session's prefix moves hits by whole points, and memory that is half a percent larger acts as
another draw.  So each comparison of the committed matrix in which Kvell misses a clause is
replayed in nine sizes of memory around its own, with Kvell and the best of our other managers
(vLLM's takes minutes a cell), and means are compared.
"""

import argparse
import math
import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import result_file
from bench.managers.cells import OURS, cells
from bench.managers.matrix import RESULTS as MATRIX
from bench.managers.matrix import Setting, bytes_of, found, judged, rows_of, shape_of
from bench.managers.ours import replayed
from bench.managers.store import Store
from bench.managers.theirs import REPOSITORY
from bench.managers.verdicts import (
    HIT_RATE_SLACK,
    MOST_STEPS,
    SELF,
    Comparison,
    Place,
)
from kvell.errors import ChangeSomething
from kvell.memory import Manager

RESULTS = result_file.path_of("managers_luck", result_file.VIRTUAL)
FACTORS = tuple(1 + 0.005 * step for step in range(-4, 5))
"""Memory sizes, as multiples of the cell's own."""
NEVER = 1 << 40
"""Steps between two samples of the pages: none is taken."""


@dataclass(frozen=True)
class Case:
    """A manager that was better than Kvell in a comparison."""

    place: Place
    rival: Manager


@dataclass(frozen=True)
class Figures:
    """One replay."""

    steps: int
    hit_rate: float


Pair = tuple[Figures, Figures]
"""Kvell's and the rival's, in the same memory."""


@dataclass(frozen=True)
class Finding:
    """Means over the memory sizes of one case.

    :ivar matrix_behind: hit rate behind the rival, in the matrix.
    :ivar behind: the same on average, and its standard error.
    :ivar own_hits: Kvell's hit rate, on average.
    :ivar own_spread: the largest of Kvell's hit rates less the smallest.
    :ivar own_steps: Kvell's, on average.
    :ivar steps: Kvell's over the rival's, on average.
    """

    case: Case
    sizes: int
    matrix_behind: float
    behind: float
    error: float
    own_hits: float
    own_spread: float
    own_steps: float
    steps: float

    @property
    def told(self) -> str:
        """The verdict in a word or two."""
        if self.steps > MOST_STEPS:
            return "later"
        if self.behind <= HIT_RATE_SLACK:
            return "luck"
        if self.steps < 1 / MOST_STEPS:
            return "runs fewer at once"
        return "behind" if self.behind - HIT_RATE_SLACK > 2 * self.error else "not told apart"


def rivals(one: Comparison) -> Iterator[Manager]:
    """Our other managers that beat Kvell beyond a clause's slack: best in hits, best in steps."""
    own = one.complete[SELF]
    others = {name: one.others[name] for name in OURS if name in one.others}
    most_hits = max(others, key=lambda name: others[name]["hit_rate"])
    fewest_steps = min(others, key=lambda name: others[name]["steps"])
    hits_more = others[most_hits]["hit_rate"] - own["hit_rate"] > HIT_RATE_SLACK
    is_sooner = own["steps"] > MOST_STEPS * others[fewest_steps]["steps"]
    if hits_more:
        yield most_hits
    if is_sooner and not (hits_more and fewest_steps == most_hits):
        yield fewest_steps


def finding(case: Case, matrix_behind: float, pairs: Sequence[Pair]) -> Finding:
    """Means of pairs in neighbouring sizes of memory; two at least."""
    behind = [rival.hit_rate - own.hit_rate for own, rival in pairs]
    own_hits = [own.hit_rate for own, _ in pairs]
    return Finding(
        case,
        len(pairs),
        matrix_behind,
        statistics.mean(behind),
        statistics.stdev(behind) / math.sqrt(len(behind)),
        statistics.mean(own_hits),
        max(own_hits) - min(own_hits),
        statistics.mean(own.steps for own, _ in pairs),
        statistics.mean(own.steps / rival.steps for own, rival in pairs),
    )


def replay_pair(traces: Path, job: tuple[Case, float]) -> Pair | None:
    """Replay one case in one memory size; None if a manager refuses a request there."""
    case, factor = job
    name, trace, size = case.place
    setting = Setting(traces, None, None)
    shape, rows = shape_of(name), rows_of(setting, trace)
    memory = int(bytes_of(setting, name, trace, size) * factor)
    told = []
    managers: tuple[Manager, Manager] = ("kvell", case.rival)
    for manager in managers:
        try:
            report = replayed(shape, rows, memory, manager, look_every=NEVER).report()
        except ChangeSomething:
            return None
        if report["requests_refused"]:
            return None
        told.append(Figures(report["steps"], report["hit_rate"]))
    return told[0], told[1]


def table(findings: Sequence[Finding]) -> Table:
    """A row for each case."""
    title = f"behind in the matrix: means of memory ±{FACTORS[-1] - 1:.0%}"
    printed = Table("comparison", "rival", title=title)
    for column in (
        "matrix",
        "mean ± error",
        "own hits",
        "spread",
        "own steps",
        "of rival's",
        "sizes",
    ):
        printed.add_column(column, justify="right")
    printed.add_column("so")
    for one in findings:
        printed.add_row(
            ".".join(map(str, one.case.place)),
            one.case.rival,
            f"{one.matrix_behind:.4f}",
            f"{one.behind:.4f} ± {one.error:.4f}",
            f"{one.own_hits:.4f}",
            f"{one.own_spread:.4f}",
            f"{one.own_steps:.1f}",
            f"{one.steps:.4f}",
            str(one.sizes),
            one.told,
        )
    return printed


def main() -> None:
    """Replay every case, print and write the findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--shapes", nargs="+", help="only these")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args()
    store = Store(REPOSITORY, requests=None, committed=REPOSITORY / MATRIX)
    compared, _ = judged(found(store, cells(shapes=options.shapes or ())))
    behind = {
        Case(one.place, rival): one.complete[rival]["hit_rate"] - one.complete[SELF]["hit_rate"]
        for one in compared
        for rival in rivals(one)
    }
    jobs = [(case, factor) for case in behind for factor in FACTORS]
    pairs: dict[Case, list[Pair]] = {case: [] for case in behind}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        replays = pool.map(partial(replay_pair, options.traces), jobs)
        shown = track(replays, "sizes", len(jobs), console=Console(stderr=True))
        for (case, _), pair in zip(jobs, shown, strict=True):
            if pair is not None:
                pairs[case].append(pair)
    findings = [finding(case, behind[case], each) for case, each in pairs.items() if len(each) > 1]
    Console(width=160).print(table(findings))
    told = [asdict(one) | {"told": one.told} for one in findings]
    result_file.write(options.json, told, processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
