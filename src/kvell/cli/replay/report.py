"""Tables of a replay's figures."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvell.byte_sizes import format_bytes
from kvell.cli.terminal.figures import SPREAD, wide_console
from kvell.load.outcome import Outcome
from kvell.load.report import Objectives, summary

if TYPE_CHECKING:
    from kvell.simulator.replay.request_figures import RequestFigures
    from kvell.simulator.traces.rows import TraceRow

Report = Mapping[str, Any]
"""The figures of a run."""
LATENCIES = {
    "to the first token": "ttft_seconds",
    "per output token": "tpot_seconds",
    "end to end": "e2e_seconds",
}


def print_report(report: Report) -> None:
    console = wide_console()
    console.print(run_table(report))
    console.print(latency_table(report))
    console.print(group_table(report))


def print_together(report: Report) -> None:
    console = wide_console()
    console.print(latency_table(report))
    console.print(roles_table(report))


def roles_table(report: Report) -> Table:
    """Return a table with a column per role, with transfers between instances."""
    roles: Mapping[str, Any] = report["roles"]
    counts = ",".join(f"{role}={count}" for role, count in report["instances"].items())
    table = Table(title=f"{report['model']}, {report['trace']}, {counts}, {report['routing']}")
    table.add_column("figure")
    for role in roles:
        table.add_column(role, justify="right")
    shown: Mapping[str, Callable[[Any], str]] = {
        "instances": "{:,}".format,
        "steps": "{:,}".format,
        "busy": "{:.1%}".format,
        "computed_tokens": "{:,}".format,
        "hit_rate": "{:.1%}".format,
        "arriving_hit_rate": "{:.1%}".format,
        "pulled_bytes": format_bytes,
        "preemptions": "{:,}".format,
    }
    for name, written in shown.items():
        values = (written(figures[name]) for figures in roles.values())
        table.add_row(name.replace("_", " "), *values)
    for name in report["sections"]:
        values = (f"{figures['sections'][name]:,}" for figures in roles.values())
        table.add_row(f"sections {name}", *values)
    for name in ("requests_finished", "requests_refused", "requests_moved"):
        table.add_row(name.replace("_", " "), f"{report[name]:,}")
    return table


def run_table(report: Report) -> Table:
    """Return a table with a row per figure; its last column counts steps with waiting requests."""
    table = Table(title=f"{report['model']}, {report['trace']}, {report['manager']}")
    table.add_column("figure")
    table.add_column("all steps", justify="right")
    table.add_column("saturated", justify="right")
    table.add_row("KV memory", format_bytes(report["kv_memory_bytes"]))
    table.add_row("requests finished", f"{report['requests_finished']:,}")
    table.add_row("requests refused", f"{report['requests_refused']:,}")
    table.add_row("steps", f"{report['steps']:,}")
    batches = (report["batch_mean"], report["batch_saturated_mean"])
    table.add_row("running requests", *(f"{batch:.1f}" for batch in batches))
    for name in ("waste", "stranded"):
        shares = (report[name], report[f"{name}_saturated"])
        table.add_row(name, *(f"{share:.2%}" for share in shares))
    table.add_row("hit rate", f"{report['hit_rate']:.2%}")
    table.add_row("preemptions", f"{report['preemptions']:,}")
    table.add_row("manager µs per request-step", f"{report['manager_us_per_request_step']:.2f}")
    table.add_row("virtual seconds", f"{report['virtual_seconds']:,.1f}")
    table.add_row("wall seconds", f"{report['wall_seconds']:,.1f}")
    return table


def latency_table(report: Report) -> Table:
    table = Table(title="virtual milliseconds, as clients see them")
    for name in ("", *SPREAD):
        table.add_column(name, justify="right" if name else "left")
    for name, key in LATENCIES.items():
        seconds = [report[key][part] for part in SPREAD]
        table.add_row(
            name, *("–" if value is None else f"{value * 1000:,.1f}" for value in seconds)
        )
    table.add_row("requests/s", f"{report['request_rate']:,.2f}")
    table.add_row("  that met the objectives", f"{report['goodput']:,.2f}")
    table.add_row("output tokens/s", f"{report['output_tokens_per_second']:,.1f}")
    return table


def group_table(report: Report) -> Table:
    """Return a table with a row per layer group: means over all steps."""
    table = Table(title="layer groups, means over steps")
    for name in ("group", "layers", "page", "needed", "allocated", "waste", "stranded", "cached"):
        table.add_column(name, justify="left" if name == "group" else "right")
    for group in report["groups"]:
        table.add_row(
            group["name"],
            str(group["layers"]),
            format_bytes(group["page_stride_bytes"]),
            format_bytes(int(group["needed_bytes_mean"])),
            format_bytes(int(group["allocated_bytes_mean"])),
            f"{group['waste']:.2%}",
            f"{group['stranded']:.2%}",
            format_bytes(int(group["cached_bytes_mean"])),
        )
    return table


UNKNOWN = ("inter_token_seconds", "send_lag_seconds")
"""The figures that a replay lacks: it records only first and last tokens, and never sends late."""
REFUSED = "refused"


def outcomes(figures: "Iterable[RequestFigures]", rows: "Iterable[TraceRow]") -> list[Outcome]:
    """Return the outcome of each request that arrived; answers have the lengths of the trace."""
    return [
        _outcome(request, row.output_tokens)
        for request, row in zip(figures, rows, strict=True)
        if request.came_seconds is not None
    ]


def latencies(outcomes: list[Outcome], objectives: Objectives, refused: int) -> dict[str, Any]:
    """Return seconds to the first token, per token and end to end, rates and goodput.

    :param refused: number of requests that could not be served, including those that never arrived.
    """
    figures = summary(outcomes, objectives)
    for name in UNKNOWN:
        del figures[name]
    return figures | {"failed": refused, "failures": {REFUSED: refused} if refused else {}}


def _outcome(request: "RequestFigures", output_tokens: int) -> Outcome:
    came = request.came_seconds or 0.0
    if request.finish_seconds is None or request.first_token_seconds is None:
        return Outcome(request.index, came, came, came, failure=REFUSED)
    return Outcome(
        request.index,
        came,
        came,
        request.finish_seconds,
        (request.first_token_seconds, request.finish_seconds),
        request.prompt_tokens,
        output_tokens,
        request.hit_tokens,
    )
