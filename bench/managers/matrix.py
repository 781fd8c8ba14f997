"""Every shape × trace × memory size, under every manager of ours and under vLLM's.

Run from the repository's root: ``python -m bench.managers.matrix --traces DIR --vllm-env DIR``.
Each cell's result is kept in ``.cache/managers``, so an interrupted run goes on where it was; cells
of the committed results whose sources are still the same are not run again.  ``--report`` only
reads what is there.  Filters choose what is run and printed; the file has every cell there is.
"""

import argparse
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench import result_file
from bench.managers.bound import bound
from bench.managers.cells import (
    IDEAL,
    MANAGERS,
    SHAPES,
    SIZES,
    TRACES,
    VLLM,
    Cell,
    cells,
    kinds,
    memory_bytes,
)
from bench.managers.ours import outcome
from bench.managers.report import printed
from bench.managers.results import written
from bench.managers.store import Store
from bench.managers.theirs import REPOSITORY, Peer, peer_job
from bench.managers.verdicts import Comparison, Verdict, comparisons, verdicts
from bench.replay.shapes import Shape, read_shape
from kvell.errors import ChangeSomething
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import read_trace

RESULTS = result_file.path_of("managers", result_file.VIRTUAL)
QUICK_RESULTS = result_file.path_of("managers_quick", result_file.VIRTUAL)
QUICK_REQUESTS = 60
MOST_PROCESSES = 2
SAMPLE_EVERY = 256
"""Steps between two samples of vLLM's pages, which are slow to scan: it keeps no totals."""


@dataclass(frozen=True)
class Setting:
    """What a worker needs besides a cell.

    :param requests: of each trace; None for as many as the matrix says.
    :param vllm: environment of vLLM; None leaves its cells out.
    """

    traces: Path
    requests: int | None
    vllm: Path | None

    def path(self, trace: str) -> Path:
        """A trace's file."""
        return self.traces / f"{trace}.jsonl.gz"

    def limit(self, trace: str) -> int:
        """Requests of a trace."""
        return min(TRACES[trace], self.requests or TRACES[trace])


@cache
def rows_of(setting: Setting, trace: str) -> list[TraceRow]:
    """A trace's first requests."""
    return read_trace(setting.path(trace), setting.limit(trace))


@cache
def shape_of(name: str) -> Shape:
    """A shape, read once."""
    return read_shape(name)


@cache
def bytes_of(setting: Setting, shape: str, trace: str, size: int) -> int:
    """Memory of a cell."""
    return memory_bytes(shape_of(shape), rows_of(setting, trace), size)


@cache
def peer(environment: Path) -> Peer:
    """This worker's vLLM process."""
    return Peer(environment)


def run_cell(setting: Setting, cell: Cell) -> dict[str, Any]:
    """Replay one cell."""
    shape, rows = shape_of(cell.shape), rows_of(setting, cell.trace)
    memory = bytes_of(setting, cell.shape, cell.trace, cell.size)
    if cell.manager == IDEAL:
        return bound(shape, rows, memory)
    if cell.manager not in VLLM:
        return outcome(shape, rows, memory, cell.manager)  # type: ignore[arg-type]
    if setting.vllm is None:
        raise ValueError("a cell of vLLM's without its environment")
    job = peer_job(
        shape,
        setting.path(cell.trace),
        len(rows),
        memory,
        retention_tokens=VLLM[cell.manager],
        sample_every=SAMPLE_EVERY,
        skips_idle=True,
    )
    figures: dict[str, Any] = peer(setting.vllm).run(job)
    return figures


def missing(setting: Setting, store: Store, asked: Iterable[Cell]) -> Iterator[Cell]:
    """Cells that have no result yet and can be run."""
    for cell in asked:
        if cell.manager in VLLM and setting.vllm is None:
            continue
        memory = bytes_of(setting, cell.shape, cell.trace, cell.size)
        if store.get(cell, memory) is None:
            yield cell


def run(setting: Setting, store: Store, todo: Sequence[Cell], processes: int) -> None:
    """Replay cells, and keep each result as it comes."""
    spawn = multiprocessing.get_context("spawn")
    with (
        Progress(console=Console(stderr=True)) as bar,
        ProcessPoolExecutor(processes, mp_context=spawn) as pool,
    ):
        task = bar.add_task("cells", total=len(todo))
        running = {pool.submit(run_cell, setting, cell): cell for cell in todo}
        try:
            for done in as_completed(running):
                cell = running[done]
                memory = bytes_of(setting, cell.shape, cell.trace, cell.size)
                store.put(cell, memory, done.result())
                bar.update(task, advance=1, description=cell.name)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def found(store: Store, asked: Iterable[Cell]) -> dict[Cell, dict[str, Any]]:
    """Existing results, of any sources."""
    results = ((cell, store.last(cell)) for cell in asked)
    return {cell: result for cell, result in results if result is not None}


def stale(store: Store, results: Mapping[Cell, dict[str, Any]]) -> list[Cell]:
    """Cells that were measured with other sources than today's."""
    return [cell for cell, one in results.items() if one["sources"] != store.sources(cell)]


def judged(results: Mapping[Cell, dict[str, Any]]) -> tuple[list[Comparison], list[Verdict]]:
    """Comparisons and verdicts of results."""
    by_shape = {name: kinds(shape_of(name)) for name in {cell.shape for cell in results}}
    compared = comparisons(results, by_shape)
    return compared, verdicts(compared)


def report(store: Store, asked: Sequence[Cell], out: Path) -> bool:
    """Print verdicts on the asked cells, write all cells; return whether all verdicts hold."""
    every = found(store, cells())
    compared, told = judged({cell: every[cell] for cell in asked if cell in every})
    console = Console(width=140)
    for table in printed(compared, told):
        console.print(table)
    others = stale(store, every)
    if others:
        console.print(f"{len(others)} of {len(every)} cells were measured with other sources")
    about = result_file.run(result_file.VIRTUAL)
    out.write_text(written(every, *judged(every), len(others), about))
    return all(one.holds for one in told)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, help="directory of the traces")
    parser.add_argument("--vllm-env", type=Path, help="what bench.managers.environment made")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this shape")
    parser.add_argument("--trace", action="append", choices=tuple(TRACES), help="only this trace")
    parser.add_argument("--size", action="append", type=int, choices=SIZES, help="only this size")
    parser.add_argument("--manager", action="append", choices=MANAGERS, help="only this manager")
    parser.add_argument("--quick", action="store_true", help="60 requests of each trace")
    parser.add_argument("--processes", type=int, choices=range(1, MOST_PROCESSES + 1), default=1)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    return parser.parse_args()


def main() -> None:
    """Run what is missing, then report."""
    args = arguments()
    asked = list(cells(args.shape or (), args.trace or (), args.size or (), args.manager or ()))
    setting = Setting(args.traces, QUICK_REQUESTS if args.quick else None, args.vllm_env)
    results = QUICK_RESULTS if args.quick else RESULTS
    store = Store(REPOSITORY, requests=setting.requests, committed=REPOSITORY / results)
    if not args.report:
        run(setting, store, list(missing(setting, store, asked)), args.processes)
    try:
        holds = report(store, asked, args.out or results)
    except ChangeSomething as error:
        raise SystemExit(str(error)) from error
    print("all holds" if holds else "something does not hold")


if __name__ == "__main__":
    main()
