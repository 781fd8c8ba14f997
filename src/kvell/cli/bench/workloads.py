"""``kvell bench workloads``: statistics of workloads next to those that papers publish."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from kvell.cli.terminal.figures import wide_console
from kvell.cli.terminal.options import json_option
from kvell.cli.terminal.session import debug_option
from kvell.cli.terminal.tables import made_table
from kvell.errors import ChangeSomething

COLUMNS = {
    "requests": "requests",
    "sessions": "sessions",
    "asked_tokens_mean": "asked",
    "prompt_tokens_mean": "prompt",
    "output_tokens_mean": "output",
    "prompt_per_output": "in/out",
    "shared_share": "shared",
    "context_tokens_mean": "context",
    "context_tokens_deviation": "SD",
    "context_tokens_max": "longest",
}


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME…]")
@click.option("--num-requests", type=click.IntRange(min=1), metavar="N", help="Requests of each.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="The same seed makes the same requests.",
)
@json_option
@debug_option
def workloads(names: tuple[str, ...], num_requests: int | None, seed: int, as_json: bool) -> None:
    """Show statistics of the named workloads, or of all, next to the published ones.

    Lengths are means in tokens: asked is the prompt that a turn adds to its session, context is
    prompt and output; shared is the part of prompt tokens that an unbounded cache would hit.
    """
    described = [_described(name, num_requests, seed) for name in _known(names)]
    if as_json:
        click.echo(json.dumps(described))
        return
    console = wide_console()
    rows = [row for workload in described for row in _rows(workload)]
    console.print(made_table("workloads", ("tokens", *COLUMNS.values()), rows))
    for row in described:
        if row["published"] is not None:
            says = f"{row['workload']}: {row['published']['source']}: {row['published']['says']}"
            console.print(says, soft_wrap=True)


def _known(names: Sequence[str]) -> Sequence[str]:
    from kvell.simulator.traces.generators import GENERATORS

    for name in names:
        if name not in GENERATORS:
            choices = ", ".join(GENERATORS)
            raise ChangeSomething("NAME", name, "is not a workload", f"use {choices}")
    return names or list(GENERATORS)


def _described(name: str, count: int | None, seed: int) -> dict[str, Any]:
    from kvell.simulator.traces.generators import generate_trace
    from kvell.simulator.traces.published import PUBLISHED, statistics

    published = PUBLISHED.get(name)
    return {
        "workload": name,
        "seed": seed,
        "statistics": asdict(statistics(generate_trace(name, count, seed))),
        "published": None if published is None else asdict(published),
    }


def _rows(workload: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [(workload["workload"], *_cells(workload["statistics"]))]
    if workload["published"] is not None:
        rows.append(("  published", *_cells(workload["published"]["figures"])))
    return rows


def _cells(figures: dict[str, Any]) -> list[str]:
    return [_cell(key, figures[key]) for key in COLUMNS]


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    if key == "shared_share":
        return f"{value:.1%}"
    return f"{value:,.1f}" if key == "prompt_per_output" else f"{value:,.0f}"
