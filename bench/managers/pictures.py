"""Drawings of the plots bench: lines over steps, lines over articles, bars by manager."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvell.simulator.report.pictures import GREY, INK, quiet, saved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HUES = {
    "kvell": "#1f6fb4",
    "jenga": "#2a9d6b",
    "paged": "#e08214",
    "max-page": "#b5489b",
    "static": "#6b7280",
    "vllm": "#c9a400",
    "vllm-dense": "#8c564b",
}
Points = Sequence[tuple[float, float]]
"""Pairs of x and y."""


def lines(
    panels: Mapping[str, Mapping[str, Points]], xlabel: str, ylabel: str, *, steps: bool = False
) -> bytes:
    """A panel for each title with a line for each manager; a PNG.

    :param steps: a value holds until the next.
    """
    figure = _figure(len(panels))
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, by_manager) in zip(all_axes, panels.items(), strict=True):
        for manager, points in by_manager.items():
            style: dict[str, Any] = {"drawstyle": "steps-post"} if steps else {"marker": "o"}
            xs, ys = zip(*points, strict=True)
            style["linewidth"] = 3.2 if manager == "kvell" else 1.1  # the others lie on it
            axes.plot(xs, ys, label=manager, color=HUES[manager], markersize=3, **style)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _named(axes, title)
        axes.set_xlabel(xlabel, color=GREY)
    all_axes[0].set_ylabel(ylabel, color=GREY)
    all_axes[0].set_ylim(bottom=0)
    all_axes[-1].legend(frameon=False, fontsize=8)
    return saved(figure, "png")


def bars(panels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> bytes:
    """Panel → shape → manager → value, below each other; a PNG."""
    figure = _figure(2, len(panels))
    all_axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (title, by_shape) in zip(all_axes, panels.items(), strict=True):
        managers = list(dict.fromkeys(name for one in by_shape.values() for name in one))
        width = 0.8 / len(managers)
        for index, manager in enumerate(managers):
            at = [
                (place + width * (index - (len(managers) - 1) / 2), one[manager])
                for place, one in enumerate(by_shape.values())
                if manager in one
            ]
            xs, ys = zip(*at, strict=True)
            axes.bar(xs, ys, width, label=manager, color=HUES[manager])
        axes.set_xticks(range(len(by_shape)), list(by_shape), rotation=20, ha="right", fontsize=8)
        _named(axes, title)
    all_axes[0].legend(frameon=False, fontsize=8, ncols=4)
    return saved(figure, "png")


def _figure(columns: int, rows: int = 1) -> "Figure":
    """No pyplot: nothing outside the figure changes."""
    from matplotlib.figure import Figure

    return Figure(figsize=(4.6 * columns, 0.6 + 2.6 * rows), dpi=100, layout="constrained")


def _named(axes: "Axes", title: str) -> None:
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK, loc="left")
    quiet(axes)
