"""Memory pressure: a pool for a quarter of the wanted batch, Kvell against one page size for all.

``--virtual``: the shapes at full size, on a profile of an H100.  Without it: the shapes scaled down
with random weights, for real, in this process; ``--clock cpu --threads 1`` beside busy neighbours,
who then matter only through caches and memory.
"""

from kvell.cli.terminal.environment import prepare_process

prepare_process()  # the launcher's own settings; torch reads them when it is imported

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import machine, result_file
from bench.engine.pressure import real, small, virtual
from bench.engine.pressure.cases import Case
from bench.engine.pressure.figures import (
    Figures,
    Rounds,
    mean_ratio,
    medians,
    ratio,
    slower_without_pressure,
)
from kvell.memory import Manager

LEAST = {"virtual": 1.8, "real": 1.3}
"""Decode tokens per second under pressure, Kvell over ``paged``, geometric mean."""
MANAGERS: tuple[Manager, ...] = ("kvell", "paged")
POOLS = ("pressed", "ample")
Measure = Callable[[Case, bool], dict[str, dict[str, list[Figures]]]]
"""By clock and manager, of a case whose pool is pressed or not."""
Found = dict[str, dict[str, Rounds]]
"""By pool and shape."""


def in_virtual_time(case: Case, pressed: bool) -> dict[str, dict[str, list[Figures]]]:
    """Measure in virtual time; one round, since it is deterministic."""
    return {"virtual": {m: [virtual.measured(case, m, pressed=pressed)] for m in MANAGERS}}


def for_real(rounds: int) -> Measure:
    """Measure for real, ``rounds`` rounds of each manager."""
    return lambda case, pressed: real.alternated(case, rounds, pressed=pressed)


def measured(cases: Sequence[Case], measure: Measure, told: Console) -> dict[str, Found]:
    """Measure every case, pressed and ample; by clock."""
    found: dict[str, Found] = {}
    for case in cases:
        for pool in POOLS:
            told.print(f"{case.shape}, {pool} …")
            for clock, rounds in measure(case, pool == "pressed").items():
                found.setdefault(clock, {name: {} for name in POOLS})[pool][case.shape] = rounds
    return found


def show(console: Console, found: Found) -> None:
    """Both pools, a row for each shape."""
    for pool, shapes in found.items():
        table = Table(title=f"{pool} pool: kvell / paged, medians")
        names = ("decode tokens/s", "×", "output tokens/s", "×", "batch", "TTFT", "TPOT")
        for name in ("shape", *names):
            table.add_column(name, justify="left" if name == "shape" else "right")
        for shape, rounds in shapes.items():
            table.add_row(shape, *_cells(rounds))
        console.print(table)


def _cells(rounds: Rounds) -> list[str]:
    ours, theirs = (medians(rounds[name]) for name in MANAGERS)
    cells: list[str] = []
    for figure in ("decode_tokens_per_second", "output_tokens_per_second"):
        cells += [f"{ours[figure]:.0f} / {theirs[figure]:.0f}", f"{ratio(rounds, figure):.2f}"]
    cells.append(f"{ours['batch']:.1f} / {theirs['batch']:.1f}")
    return cells + [f"{ratio(rounds, f'{name}_seconds') - 1:+.1%}" for name in ("ttft", "tpot")]


def verdicts(kind: str, found: Found) -> dict[str, bool]:
    """The bounds, and whether each is kept."""
    wanted, slower = LEAST[kind], slower_without_pressure(found["ample"])
    return {
        f"decode under pressure at least {wanted}": mean_ratio(found["pressed"]) >= wanted,
        "TTFT and TPOT without pressure within 3 %" + "".join(f"; {s}" for s in slower): not slower,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--virtual", action="store_true", help="in virtual time, at full size")
    parser.add_argument("--shapes", nargs="+", help="some of the shapes")
    parser.add_argument("--rounds", type=int, default=3, help="of each manager, for real")
    parser.add_argument("--clock", default="wall", choices=tuple(real.CLOCKS))
    parser.add_argument("--threads", type=int, default=0, help="0: OpenMP's number")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args(arguments)
    kind, console = "virtual" if options.virtual else "real", Console(width=140)
    if options.threads:
        torch.set_num_threads(options.threads)
    cases = virtual.CASES if options.virtual else small.CASES
    asked = [case for case in cases if case.shape in (options.shapes or case.shape)]
    measure = in_virtual_time if options.virtual else for_real(options.rounds)
    by_clock = measured(asked, measure, Console(stderr=True))
    clock = "virtual" if options.virtual else options.clock
    found = by_clock[clock]
    about: dict[str, Any] = {"profile": virtual.HARDWARE} if options.virtual else machine.describe()
    console.print(about, f"clock: {clock}")
    show(console, found)
    report: dict[str, Any] = {"machine": about, "clock": clock, "figures": by_clock}
    report["decode_ratio"] = mean_ratio(found["pressed"])
    report["output_ratio"] = mean_ratio(found["pressed"], "output_tokens_per_second")
    both = f"{report['decode_ratio']:.2f}× decode, {report['output_ratio']:.2f}× with prefill"
    console.print(f"geometric mean under pressure: {both}")
    for verdict, holds in verdicts(kind, found).items():
        console.print(f"{verdict}: {'yes' if holds else 'no'}")
    processor = result_file.VIRTUAL if options.virtual else None
    path = options.json or result_file.path_of(f"pressure_{kind}", processor)
    result_file.write(path, report | {"verdicts": verdicts(kind, found)}, processor=processor)


if __name__ == "__main__":
    main()
