"""The content of a timeline's picture: states, shares of the pool, colours and scales."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvell.simulator.report.timeline import GroupMoment, Moment
from kvell.vocabulary import GIB, KIB, MIB

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
    """Return the largest unit that the pool reaches, and its bytes."""
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
