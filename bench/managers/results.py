"""The file of the matrix' results: one compact line of JSON per cell, written and read.

A cell's line has the figures that verdicts read and the fingerprint of its sources, so a fresh
checkout knows what need not be measured again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.managers.cells import Cell, is_refused
from bench.managers.verdicts import Comparison, Verdict

WRITTEN = (
    "steps",
    "batch_mean",
    "hit_rate",
    "short_of_memory",
    "waste",
    "preemptions",
    "requests_refused",
    "decisions",
)
"""Figures of a cell in the file, in this order, rounded; null where a manager lacks one."""
DIGITS = 6
MEMORY, SOURCES = "kv_memory_bytes", "sources"
"""Fields after the figures: the memory size, and the index of its sources in the file's list."""


def written(
    results: Mapping[Cell, Mapping[str, Any]],
    compared: Sequence[Comparison],
    told: Sequence[Verdict],
    num_stale: int = 0,
    run: Mapping[str, Any] | None = None,
) -> str:
    """One line for each cell, so that a change of one shows as one.

    :param results: as :class:`bench.managers.store.Store` keeps them.
    :param num_stale: how many of them were measured with other sources than these.
    :param run: what :func:`bench.result_file.run` says.
    """
    sources = sorted({outcome["sources"] for outcome in results.values()})
    head = ({"run": run} if run else {}) | {
        "cells": len(results),
        "cells_of_other_sources": num_stale,
        "comparisons": len(compared),
        "verdicts": [asdict(one) | {"part": one.part, "holds": one.holds} for one in told],
        "sources": sources,
        "figures": [*WRITTEN, MEMORY, SOURCES],
    }
    lines = [
        f" {json.dumps(cell.name)}: {_line(results[cell], sources)}" for cell in sorted(results)
    ]
    text = json.dumps(head, indent=1, ensure_ascii=False)
    return text[:-2] + ',\n "by_cell": {\n' + ",\n".join(lines) + "\n }\n}\n"


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Outcomes by their cells' names, as they were written; none where there is no such file."""
    try:
        file = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    sources, names = file["sources"], file["figures"]
    return {name: _outcome(names, line, sources) for name, line in file["by_cell"].items()}


def _line(outcome: Mapping[str, Any], sources: Sequence[str]) -> str:
    where = (outcome["asked_bytes"], sources.index(outcome["sources"]))
    if is_refused(outcome):
        told = {"refused": outcome["refused"]} | dict(zip((MEMORY, SOURCES), where, strict=True))
        return json.dumps(told, ensure_ascii=False)
    return json.dumps([*(_rounded(outcome.get(name)) for name in WRITTEN), *where])


def _outcome(names: Sequence[str], line: Any, sources: Sequence[str]) -> dict[str, Any]:
    told = dict(line) if isinstance(line, dict) else dict(zip(names, line, strict=True))
    outcome = {name: value for name, value in told.items() if value is not None}
    outcome["asked_bytes"] = outcome.pop(MEMORY)
    outcome["sources"] = sources[outcome.pop(SOURCES)]
    return outcome


def _rounded(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value
