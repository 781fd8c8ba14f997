"""The matrix as tables."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table

from bench.managers.cells import MANAGERS
from bench.managers.verdicts import SELF, Comparison, Verdict, refusals

LISTED = 40


def printed(compared: Sequence[Comparison], told: Sequence[Verdict]) -> Iterator[Table]:
    """Tables of verdicts, missed clauses, and steps by manager."""
    yield table_of(told)
    missed = Table("clause", "cell", "found", title="Missed")
    for verdict in told:
        for name, what in list(verdict.missed.items())[:LISTED]:
            missed.add_row(verdict.clause[:40], name, what)
    if missed.row_count:
        yield missed
    yield sums(compared)
    refused = Counter(
        (manager, name.rsplit(".", 2)[0], why) for name, manager, why in refusals(compared)
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
