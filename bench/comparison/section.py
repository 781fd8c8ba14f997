"""A part of the page: a table, bars, and the command that measured it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bars:
    """A plot: for each group a bar of each series.

    :param name: of its file, without its ending.
    :param series: name to values, one per group; None leaves a gap.
    """

    name: str
    title: str
    unit: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Section:
    """One question and its answer.

    :param source: file under ``bench/results`` that it was made from.
    :param command: measures it anew.
    :param columns: of the table; the first is left-aligned.
    """

    title: str
    note: str
    source: str
    command: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Sequence[Bars] = ()


def number(value: float | None, digits: int = 1) -> str:
    """A figure of a table."""
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A part of a whole."""
    return "–" if value is None else f"{value:.{digits}%}"
