"""Plots of a run: the latencies of clients, and the number of open requests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvell.load.outcome import Outcome
from kvell.load.report import Objectives, open_over_time
from kvell.simulator.report.pictures import GREY, INK, quiet, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HUE, BAD_HUE = "#2563eb", "#dc2626"
SPREADS = {
    "ttft_seconds": "time to first token",
    "tpot_seconds": "time per output token",
    "e2e_seconds": "end to end",
    "inter_token_seconds": "between tokens",
    "send_lag_seconds": "sent late by",
}
"""The figures with a mean and percentiles in the report."""


def draw_load(
    path: Path,
    title: str,
    outcomes: Sequence[Outcome],
    objectives: Objectives,
    report: Mapping[str, Any],
) -> None:
    """Write a PNG, SVG or HTML file, chosen by its suffix.

    :raises OSError: if the file cannot be written.
    """
    figure = _figure(title, outcomes, objectives)
    write_picture(path, figure, title, lambda: _table(report))


def _figure(title: str, outcomes: Sequence[Outcome], objectives: Objectives) -> "Figure":
    from matplotlib.figure import Figure

    complete = [outcome for outcome in outcomes if outcome.is_complete]
    figure = Figure(figsize=(10, 6.4), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=11, fontweight="bold", color=INK)
    (first, each), (waits, open_now) = figure.subplots(2, 2)
    ttfts = [outcome.ttft_seconds for outcome in complete]
    tpots = [tpot for outcome in complete if (tpot := outcome.tpot_seconds) is not None]
    _draw_shares(first, "time to first token, s", ttfts, objectives.ttft_seconds)
    _draw_shares(each, "time per output token, s", tpots, objectives.tpot_seconds)
    failed = [outcome.sent_seconds for outcome in outcomes if outcome.failure is not None]
    waits.scatter(
        [o.sent_seconds for o in complete], ttfts, s=9, color=HUE, alpha=0.6, linewidths=0
    )
    waits.scatter(failed, [0.0] * len(failed), s=16, marker="x", color=BAD_HUE)
    waits.set(xlabel="sent at, seconds", ylabel="time to first token, s", ylim=(0, None))
    steps = open_over_time(outcomes)
    open_now.step([at for at, _ in steps], [count for _, count in steps], where="post", color=GREY)
    open_now.yaxis.get_major_locator().set_params(integer=True)
    open_now.set(xlabel="seconds", ylabel="open requests", ylim=(0, None))
    for axes in (first, each, waits, open_now):
        quiet(axes)
    return figure


def _draw_shares(
    axes: "Axes", name: str, values: Sequence[float], objective_seconds: float | None
) -> None:
    ordered = np.sort(np.asarray([0.0, *values]))
    axes.step(ordered, np.arange(len(ordered)) / max(1, len(values)), where="post", color=HUE)
    if objective_seconds is not None:
        axes.axvline(objective_seconds, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set(xlabel=name, ylabel="part of requests", ylim=(0, 1.02), xlim=(0, None))


def _table(report: Mapping[str, Any]) -> str:
    heads = "".join(f"<th>{head}</th>" for head in ("seconds", "mean", "p50", "p90", "p99"))
    rows = "".join(
        f"<tr><th>{name}</th>{_cells(report[key])}</tr>" for key, name in SPREADS.items()
    )
    rates = ", ".join(
        f"{report[key]:.3g} {name}"
        for key, name in (
            ("completed", "completed"),
            ("failed", "failed"),
            ("request_rate", "requests/s"),
            ("output_tokens_per_second", "output tokens/s"),
            ("goodput", "good requests/s"),
        )
    )
    return f"<caption>{rates}</caption><tr>{heads}</tr>{rows}"


def _cells(figures: Mapping[str, float | None]) -> str:
    shown = ("–" if value is None else f"{value:.4g}" for value in figures.values())
    return "".join(f"<td>{value}</td>" for value in shown)
