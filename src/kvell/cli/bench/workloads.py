"""``kvell bench workloads``: statistics of workloads beside those that papers publish."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from kvell.cli.terminal.figures import wide_console
from kvell.cli.terminal.options import debug_option, json_option
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
    """Statistics of the named workloads, or of all, beside the published ones.

    Lengths are means in tokens: asked is what a turn adds to its session, context is prompt
    and output together; shared is the part of prompt tokens that an unbounded cache would hit.
    """
    found = [_described(name, num_requests, seed) for name in _known(names)]
    if as_json:
        click.echo(json.dumps(found))
        return
    console = wide_console()
    rows = [row for one in found for row in _rows(one)]
    console.print(made_table("workloads", ("tokens", *COLUMNS.values()), rows))
    for one in found:
        if one["published"] is not None:
            says = f"{one['workload']}: {one['published']['source']}: {one['published']['says']}"
            console.print(says, soft_wrap=True)


def _known(names: Sequence[str]) -> Sequence[str]:
    from kvell.simulator.traces.generators import GENERATORS

    for name in names:
        if name not in GENERATORS:
            known = ", ".join(GENERATORS)
            raise ChangeSomething("NAME", name, "is no workload", f"use {known}")
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


def _rows(one: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [(one["workload"], *_cells(one["statistics"]))]
    if one["published"] is not None:
        rows.append(("  published", *_cells(one["published"]["figures"])))
    return rows


def _cells(figures: dict[str, Any]) -> list[str]:
    return [_cell(key, figures[key]) for key in COLUMNS]


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    if key == "shared_share":
        return f"{value:.1%}"
    return f"{value:,.1f}" if key == "prompt_per_output" else f"{value:,.0f}"
