"""Common parts of all pictures: colours, plain axes, reproducible files."""

import io
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from kvell.errors import ChangeSomething

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".html")
INK, GREY = "#111827", "#4b5563"
STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;color:#111827;margin:2rem auto;max-width:80rem;"
    "padding:0 1rem}svg{width:100%;height:auto}table{border-collapse:collapse;margin-top:1rem}"
    "caption{text-align:left;color:#4b5563;padding:.3rem 0}"
    "th,td{padding:.3rem .9rem;text-align:right;border-bottom:1px solid #e5e7eb}"
    "th:first-child{text-align:left}"
)
"""CSS of an HTML page with a picture and a table."""


def quiet(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9ca3af")
    axes.tick_params(colors=GREY, labelsize=8.5)
    axes.set_axisbelow(False)
    axes.grid(axis="y", color=INK, alpha=0.08, linewidth=0.6)


def check_picture(flag: str, path: Path, example: str) -> None:
    """Check the picture's name before the run, so that a wrong name does not cost a run.

    :raises ChangeSomething: if the suffix is unknown or matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        problem = f"ends in none of {', '.join(FORMATS)}"
        raise ChangeSomething(flag, path, problem, f"use {path.stem or example}.png")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        problem = "needs matplotlib, which is not installed"
        raise ChangeSomething(flag, path, problem, "run pip install 'kvell[plot]'") from error


def write_picture(path: Path, figure: "Figure", title: str, table: Callable[[], str]) -> None:
    """Write a PNG, SVG or HTML file, chosen by its suffix.

    :param table: returns the inside of a page's table.
    :raises OSError: if the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix == ".png":
        path.write_bytes(_file_bytes(figure, "png"))
        return
    svg = _file_bytes(figure, "svg").decode()
    if suffix == ".html":
        svg = (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            f"<title>{escape(title)}</title><style>{STYLE}</style>{svg[svg.index('<svg') :]}"
            f"<table>{table()}</table></html>\n"
        )
    path.write_text(svg, encoding="utf-8")


def _file_bytes(figure: "Figure", kind: str) -> bytes:
    """Return the file's bytes, the same for the same figure: no date, no random names."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "kvell", "hatch.linewidth": 0.5}):
        figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()
