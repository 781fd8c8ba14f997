"""Bars as SVG: text that git can compare, the same from the same figures."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from bench.comparison.section import Bars

COLOURS = ("#2b6cb0", "#dd6b20", "#718096", "#38a169", "#805ad5", "#d53f8c")
HEIGHT_PER_BAR, HEIGHT_REST = 0.18, 1.0
WIDTH = 8.0


def draw(bars: Bars, path: Path) -> None:
    """Write ``bars`` to ``path``, groups from top to bottom."""
    count = len(bars.series)
    figure = Figure(figsize=(WIDTH, HEIGHT_REST + HEIGHT_PER_BAR * (count + 1) * len(bars.groups)))
    axes = figure.subplots()
    thickness = 0.8 / count
    for index, (name, values) in enumerate(bars.series.items()):
        places = [group + (index - (count - 1) / 2) * thickness for group in range(len(values))]
        known = [0.0 if value is None else value for value in values]
        drawn = axes.barh(places, known, thickness, label=name, color=COLOURS[index % len(COLOURS)])
        labels = ["" if value is None else f"{value:,.3g}" for value in values]
        axes.bar_label(drawn, labels, padding=2, fontsize=7)
    axes.set_yticks(range(len(bars.groups)), bars.groups, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(bars.unit)
    axes.set_title(bars.title, fontsize=10)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    if count > 1:
        axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": bars.name, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
