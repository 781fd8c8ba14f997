"""Bounds on the memory core's cost, and tables that say whether they are kept."""

from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import median
from typing import Any

Row = dict[str, Any]

STEP_US = 1.0
"""Per request-step of pure decode, from :data:`SMALLEST_BATCH` requests on."""
SMALLEST_BATCH = 64
FLAT = 0.2
"""Half the range of a step's figures over contexts and pools, over its middle.

They are measured minutes apart on a machine whose speed changes, so each is divided by the time
of a yardstick measured beside it; the plain range is shown too.
"""
MATCH_US = {4096: 50.0, 131072: 1000.0}
INSERT_US = {4096: 100.0}
TRACE_US = 2.0
"""Per request-step of a whole trace: admission, prompts and evictions included."""


def decode_table(rows: Sequence[Row]) -> list[Row]:
    """Per shape and batch: the most expensive context and pool, and how flat all of them are."""

    def key(row: Row) -> tuple[str, int]:
        return row["shape"], row["batch"]

    asked = [r for r in rows if r["implementation"] == "compiled" and r["batch"] >= SMALLEST_BATCH]
    order = list(dict.fromkeys(key(row) for row in asked))
    grouped = groupby(sorted(asked, key=lambda row: order.index(key(row))), key)
    return [decode_row(shape, batch, list(found)) for (shape, batch), found in grouped]


def decode_row(shape: str, batch: int, rows: Sequence[Row]) -> Row:
    """One line of :func:`decode_table`."""
    best = [row["step"]["best_us"] for row in rows]
    flat = spread([row["yardsticks"] for row in rows])
    return {
        "shape": shape,
        "batch": batch,
        "pools": span(row["pool"] for row in rows),
        "contexts": span(row["context"] for row in rows),
        "lowest best us": min(best),
        "highest best us": max(best),
        "highest median us": max(row["step"]["median_us"] for row in rows),
        "plain range %": spread(best) * 100,
        "flat within %": flat * 100,
        "bound kept": max(best) <= STEP_US and flat <= FLAT,
    }


def over_rounds(rows: Sequence[Row]) -> Row:
    """One combination from its rounds: the best of bests, and medians of all else."""
    merged = dict(rows[0])
    for name in ("step", "quiet"):
        best = min(row[name]["best_us"] for row in rows)
        middle = median(row[name]["median_us"] for row in rows)
        merged[name] = {"best_us": best, "median_us": middle}
    return merged | {"yardsticks": median(row["yardsticks"] for row in rows)}


def spread(figures: Sequence[float]) -> float:
    """Half the range over the middle."""
    return (max(figures) - min(figures)) / (max(figures) + min(figures))


def behind_table(rows: Sequence[Row]) -> list[Row]:
    """Decode past a window: its cost, held against the bound of any decode step."""
    return [
        {
            "shape": row["shape"],
            "batch": row["batch"],
            "window tokens": row["window_tokens"],
            "best us": row["step"]["best_us"],
            "median us": row["step"]["median_us"],
            "bound kept": row["step"]["best_us"] <= STEP_US,
        }
        for row in rows
    ]


def prefix_table(rows: Sequence[Row]) -> list[Row]:
    """Match, hit and insert, each the best call; a bound counts where there is one."""
    return [
        {
            "shape": row["shape"],
            "tokens": row["tokens"],
            "matched tokens": row["matched_tokens"],
            **{
                f"{name} {which} us": row[name][f"{which}_us"]
                for name in ("match", "open_close", "insert")
                for which in ("best", "median")
            },
            "bound kept": row["match"]["best_us"] <= MATCH_US[row["tokens"]]
            and row["insert"]["best_us"] <= INSERT_US.get(row["tokens"], float("inf")),
        }
        for row in rows
        if row["implementation"] == "compiled"
    ]


def trace_table(rows: Sequence[Row]) -> list[Row]:
    """The whole trace."""
    return [
        {
            "shape": row["shape"],
            "us per request-step": row["us_per_request_step"],
            "us per step": row["us_per_step"],
            "mean batch": row["batch_mean"],
            "bound kept": row["us_per_request_step"] <= TRACE_US,
        }
        for row in rows
        if row["implementation"] == "compiled"
    ]


TABLES: dict[str, Callable[[Sequence[Row]], list[Row]]] = {
    "decode": decode_table,
    "behind": behind_table,
    "prefixes": prefix_table,
    "trace": trace_table,
}


def span(names: Any) -> str:
    """From the first to the last of names that come in order."""
    found = list(dict.fromkeys(names))
    return found[0] if len(found) == 1 else f"{found[0]}-{found[-1]}"


def printed(table: Sequence[Row]) -> str:
    """The table as Markdown."""
    if not table:
        return "(nothing)"
    cells = [list(table[0]), ["-"] * len(table[0])]
    cells += [[cell(value) for value in row.values()] for row in table]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def cell(value: Any) -> str:
    """A figure with a sensible number of digits."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3f}" if value < 1 else f"{value:.1f}"
    return str(value)
