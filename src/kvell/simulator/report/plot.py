"""Pictures of timelines: memory by owner and state, the batch below, runs side by side.

Colours are layer groups, shades are states, and states have one order for all groups: needed at the
bottom, then held without being needed, then available to any group. So the first edge is the
model's need, and the distance to the next plain area is the manager's waste. Runs share both
scales: one that ends further left finished earlier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from kvell.simulator.report.pictures import GREY, INK, check_picture, quiet, write_picture
from kvell.simulator.report.timeline import GroupMoment, Moment
from kvell.vocabulary import GIB, KIB, MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 1_000
"""Most moments to draw; a picture has about as many columns."""
HUES = ("#1f6fb4", "#e08214", "#2a9d6b", "#b5489b", "#7a5bbf", "#c9a400", "#6b7280", "#8c564b")


@dataclass(frozen=True)
class State:
    """The style of a state: the strength of its group's colour, and a hatch."""

    name: str
    strength: float
    hatch: str = ""


STATES = (
    State("needed", 1.0),
    State("used, not needed", 0.5, "////"),
    State("never written", 0.5, "...."),
    State("stranded", 0.5, "xxxx"),
    State("cached", 0.22),
)
"""States from the bottom upwards; the rest is empty."""


@dataclass(frozen=True)
class Run:
    """A timeline and its title."""

    title: str
    moments: Sequence[Moment]


def state_bytes(moment: Moment) -> list[tuple[float, ...]]:
    """Return the bytes of each of ``STATES`` by group; with ``empty_bytes`` they fill the pool.

    Large pages without a used page belong to the cache.  The number per group is not
    recorded, so they are divided in proportion to the groups' cached bytes.
    """
    cached = sum(group.cached_bytes for group in moment.groups)
    share = moment.evictable_bytes / cached if cached else 0.0
    return [_group_states(group, share) for group in moment.groups]


def _group_states(group: GroupMoment, evictable_share: float) -> tuple[float, ...]:
    needed = min(group.needed_bytes, group.used_bytes)
    return (
        needed,
        group.used_bytes - needed,
        group.unwritten_bytes,
        group.stranded_bytes,
        group.cached_bytes * evictable_share,
    )


def unit_of(pool_bytes: float) -> tuple[str, int]:
    return next(
        ((name, size) for name, size in (("GiB", GIB), ("MiB", MIB)) if pool_bytes >= size),
        ("KiB", KIB),
    )


def thin(moments: Sequence[Moment], most: int = MAX_POINTS) -> list[Moment]:
    picked = np.unique(np.linspace(0, len(moments) - 1, min(most, len(moments))).round())
    return [moments[int(index)] for index in picked]


def mean_running(run: Run) -> float:
    return float(np.mean([moment.running for moment in run.moments]))


def mean_parts(moments: Sequence[Moment]) -> list[float]:
    parts = np.zeros(len(STATES) + 1)
    for moment in moments:
        used = np.asarray(state_bytes(moment)).sum(axis=0)
        parts += np.append(used, moment.pool_bytes - used.sum()) / moment.pool_bytes
    return [float(part) for part in parts / len(moments)]


def hues_of(runs: Sequence[Run]) -> dict[str, str]:
    names = dict.fromkeys(group.name for run in runs for group in run.moments[0].groups)
    return {name: HUES[i % len(HUES)] for i, name in enumerate(names)}


Over = Literal["step", "time"]
Numbers = npt.NDArray[np.float64]
EMPTY = "#f3f4f6"


def draw(runs: Sequence[Run], path: Path, over: Over = "step") -> None:
    """Draw runs side by side into a PNG, SVG or HTML file, chosen by its suffix.

    :raises ChangeSomething: for another suffix, or if matplotlib is not installed.
    :raises OSError: if the file cannot be written.
    """
    check_picture("--out", path, "memory")
    write_picture(path, _figure(runs, over), "KV memory", lambda: _table(runs))


def _figure(runs: Sequence[Run], over: Over) -> "Figure":
    """Return the picture; without pyplot, so that no global state changes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 + 4.8 * len(runs), 5.6), dpi=150, layout="constrained")
    axes = figure.subplots(
        2, len(runs), squeeze=False, sharex=True, sharey="row", height_ratios=(3, 1)
    )
    most_bytes = max(moment.pool_bytes for run in runs for moment in run.moments)
    unit, unit_bytes = unit_of(most_bytes)
    hues = hues_of(runs)
    for run, above, below in zip(runs, *axes, strict=True):
        _draw_memory(above, run, over, unit_bytes, hues)
        _draw_batch(below, run, over)
    ends = [_positions(run.moments, over)[[0, -1]] for run in runs]
    axes[0, 0].set_xlim(min(at[0] for at in ends), max(at[1] for at in ends))
    axes[0, 0].set_ylabel(f"KV memory, {unit}")
    axes[0, 0].set_ylim(0, most_bytes / unit_bytes)
    axes[1, 0].set_ylabel("requests")
    axes[1, 0].set_ylim(bottom=0)
    _draw_legends(figure, hues)
    return figure


def _draw_memory(
    axes: "Axes", run: Run, over: Over, unit_bytes: int, hues: Mapping[str, str]
) -> None:
    moments = thin(run.moments)
    at = _positions(moments, over)
    levels = np.asarray([state_bytes(moment) for moment in moments]) / unit_bytes
    below = np.zeros(len(at))
    for index, state in enumerate(STATES):
        for group, spec in enumerate(moments[0].groups):
            above = below + _held(levels[:, group, index])
            if np.any(above > below):
                look = _look(hues[spec.name], state)
                axes.fill_between(at, below, above, step="post", linewidth=0, **look)
            below = above
    pool = _held(np.asarray([moment.pool_bytes for moment in moments]) / unit_bytes)
    axes.fill_between(at, below, pool, step="post", linewidth=0, facecolor=EMPTY)
    needed = _held(levels[:, :, 0].sum(axis=1))
    axes.step(at, needed, where="post", color=INK, linewidth=0.9)
    axes.set_title(run.title, fontsize=11, fontweight="bold", color=INK)
    quiet(axes)


def _draw_batch(axes: "Axes", run: Run, over: Over) -> None:
    moments = thin(run.moments)
    at = _positions(moments, over)
    running = _held(np.asarray([float(moment.running) for moment in moments]))
    axes.fill_between(at, running, step="post", linewidth=0, color=GREY, alpha=0.25)
    axes.step(at, running, where="post", color=GREY, linewidth=1.0)
    mean = mean_running(run)
    axes.hlines(mean, at[0], at[-1], colors=INK, linewidth=0.8, linestyles=(0, (4, 3)))
    axes.set_title(f"running, {mean:.1f} on average", fontsize=9, color=GREY, loc="left")
    axes.set_xlabel("step" if over == "step" else "virtual seconds")
    quiet(axes)


def _draw_legends(figure: "Figure", hues: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    groups = [Patch(facecolor=hue, label=name) for name, hue in hues.items()]
    states = [Patch(label=state.name, **_look(GREY, state)) for state in reversed(STATES)]
    states.insert(0, Patch(facecolor=EMPTY, edgecolor="#d1d5db", label="empty"))
    style: dict[str, Any] = {
        "alignment": "left",
        "frameon": False,
        "fontsize": 9,
        "title_fontproperties": {"weight": "bold", "size": 9},
        "handleheight": 1.4,
    }
    figure.legend(handles=states, loc="outside right upper", title="state", **style)
    figure.legend(handles=groups, loc="outside right lower", title="layer group", **style)


def _look(hue: str, state: State) -> dict[str, Any]:
    from matplotlib.colors import to_rgb

    shade = tuple(1 - state.strength * (1 - part) for part in to_rgb(hue))
    return {"facecolor": shade, "edgecolor": hue, "hatch": state.hatch or None}


def _positions(moments: Sequence[Moment], over: Over) -> Numbers:
    at = [float(m.step) if over == "step" else m.virtual_seconds for m in moments]
    last = at[-1] - at[-2] if len(at) > 1 else 0.0
    return np.asarray([*at, at[-1] + (last or 1.0)])


def _held(values: Numbers) -> Numbers:
    return np.append(values, values[-1])


def _table(runs: Sequence[Run]) -> str:
    heads = "".join(f"<th>{head}</th>" for head in ("run", "running", *_MEANS, "empty"))
    rows = "".join(f"<tr>{_cells(run)}</tr>" for run in runs)
    caption = "Means over the timeline, memory as parts of the pool"
    return f"<caption>{caption}</caption><tr>{heads}</tr>{rows}"


def _cells(run: Run) -> str:
    parts = mean_parts(run.moments)
    figures = [f"{mean_running(run):.1f}", *(f"{part:.2%}" for part in parts)]
    return f"<th>{escape(run.title)}</th>" + "".join(f"<td>{cell}</td>" for cell in figures)


_MEANS = tuple(state.name for state in STATES)
