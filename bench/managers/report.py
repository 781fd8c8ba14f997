"""The matrix as tables and as one compact JSON file."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from bench.managers.cells import MANAGERS, Cell, is_refused
from bench.managers.verdicts import SELF, Comparison, Verdict, refusals

WRITTEN = ("steps", "batch_mean", "hit_rate", "short_of_memory", "waste", "preemptions")
"""Figures of a cell in the file, in this order, rounded; memory stands with the comparison."""
DIGITS = 4
LISTED = 40


def printed(compared: Sequence[Comparison], told: Sequence[Verdict]) -> Iterator[Table]:
    """Verdicts, what was missed, and steps by manager over all."""
    yield table_of(told)
    missed = Table("clause", "cell", "found", title="Missed")
    for verdict in told:
        for name, what in list(verdict.missed.items())[:LISTED]:
            missed.add_row(verdict.clause[:40], name, what)
    if missed.row_count:
        yield missed
    yield sums(compared)
    refused = Counter(
        (manager, name.split(".")[0], why) for name, manager, why in refusals(compared)
    )
    if refused:
        table = Table("manager", "shape", "cells", "why", title="Not run, or not all of it")
        for (manager, shape, why), count in sorted(refused.items()):
            table.add_row(manager, shape, str(count), why)
        yield table


def table_of(told: Sequence[Verdict]) -> Table:
    """A row for each clause."""
    table = Table("clause", "compared", "hold", "required", "", title="Verdicts")
    for one in told:
        parts = (f"{one.part:.1%}", f"{one.required:.0%}", "yes" if one.holds else "NO")
        table.add_row(one.clause, str(one.compared), *parts)
    return table


def sums(compared: Sequence[Comparison]) -> Table:
    """Steps of ours over those of every other manager: mean, and the extremes."""
    table = Table("manager", "cells", "mean", "best", "worst", title="Steps: kvell / manager")
    for manager in MANAGERS:
        both = [one.complete for one in compared if {manager, SELF} <= set(one.complete)]
        parts = [one[SELF]["steps"] / one[manager]["steps"] for one in both]
        if parts and manager != SELF:
            figures = (sum(parts) / len(parts), min(parts), max(parts))
            table.add_row(manager, str(len(parts)), *(f"{part:.3f}" for part in figures))
    return table


def written(
    results: Mapping[Cell, Mapping[str, Any]],
    compared: Sequence[Comparison],
    told: Sequence[Verdict],
) -> str:
    """One line for each cell, so that a change of one shows as one."""
    head = {
        "cells": len(results),
        "comparisons": len(compared),
        "verdicts": [asdict(one) | {"part": one.part, "holds": one.holds} for one in told],
        "figures": [*WRITTEN, "kv_memory_bytes"],
    }
    lines = [f" {json.dumps(cell.name)}: {_line(results[cell])}" for cell in sorted(results)]
    text = json.dumps(head, indent=1, ensure_ascii=False)
    return text[:-2] + ',\n "by_cell": {\n' + ",\n".join(lines) + "\n }\n}\n"


def _line(outcome: Mapping[str, Any]) -> str:
    if is_refused(outcome):
        return json.dumps({"refused": outcome["refused"]}, ensure_ascii=False)
    figures = [_rounded(outcome.get(name)) for name in WRITTEN]
    figures.append(outcome["asked_bytes"])
    if outcome["requests_refused"]:
        figures.append(f"{outcome['requests_refused']} requests refused")
    return json.dumps(figures)


def _rounded(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value
