"""The use of memory over the steps of a run, as JSON lines, one for each sampled step.

The longer the run, the smaller the part of steps that is kept: when there are too many,
every second one is dropped, and from then on half as many are taken.  So a timeline is
bounded, evenly spaced, and the same for the same run.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvell.errors import ChangeSomething
from kvell.simulator.traces.lines_file import filled_lines, open_lines
from kvell.wire.decoding import FAULTS, decode_json

MAX_MOMENTS = 2_000


@dataclass(frozen=True)
class GroupMoment:
    """One layer group's bytes, as ``metrics`` defines them.

    ``cached_bytes`` count all cached pages; those in a large page with a used page are also
    in ``stranded_bytes``.
    """

    name: str
    needed_bytes: int
    used_bytes: int
    unwritten_bytes: int
    stranded_bytes: int
    cached_bytes: int

    @property
    def allocated_bytes(self) -> int:
        return self.used_bytes + self.unwritten_bytes


@dataclass(frozen=True)
class Moment:
    """One step.

    :param waiting: requests that have arrived and hold no pages.
    :param empty_bytes: bytes of large pages of no group.
    """

    step: int
    virtual_seconds: float
    running: int
    waiting: int
    pool_bytes: int
    empty_bytes: int
    groups: tuple[GroupMoment, ...]

    @property
    def evictable_bytes(self) -> int:
        """Bytes of groups' large pages without a used page: cached, and any group can get them."""
        held = sum(g.used_bytes + g.unwritten_bytes + g.stranded_bytes for g in self.groups)
        return self.pool_bytes - self.empty_bytes - held


class Timeline:
    """Recorder of at most ``max_moments`` (≥ 1) of the steps it is offered.

    :ivar every: one of this many steps is kept.
    """

    def __init__(self, max_moments: int = MAX_MOMENTS) -> None:
        self.every = 1
        self.moments: list[Moment] = []
        self._max_moments = max_moments
        self._offered = 0

    def offer(self, look: Callable[[], Moment]) -> None:
        """Offer a completed step; ``look`` is called if it is kept."""
        if self._offered % self.every == 0:
            self.moments.append(look())
            if len(self.moments) > self._max_moments:
                del self.moments[1::2]
                self.every *= 2
        self._offered += 1


def write_timeline(path: Path, moments: Sequence[Moment]) -> None:
    """Write moments as JSON lines, gzipped if the name ends in ``.gz``.

    :raises OSError: if the file cannot be written.
    """
    with open_lines(path, "wt") as file:
        file.writelines(json.dumps(asdict(moment)) + "\n" for moment in moments)


def read_timeline(path: Path) -> list[Moment]:
    """Read the moments of a file.

    :raises ChangeSomething: naming file and line of the first error.
    """
    remedy = "give a file that `kvell replay --timeline` wrote"
    try:
        with open_lines(path, "rt") as file:
            return _moments(path, filled_lines(file), remedy)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ChangeSomething("FILE", path, f"cannot be read ({error})", remedy) from error


def _moments(path: Path, lines: Iterable[tuple[int, str]], remedy: str) -> list[Moment]:
    moments: list[Moment] = []
    for number, line in lines:
        try:
            moments.append(_moment(decode_json(line)))
        except FAULTS as error:
            problem = f"is not a step of a timeline ({type(error).__name__}: {error})"
            raise ChangeSomething("FILE", f"{path}:{number}", problem, remedy) from error
        if _names(moments[-1]) != _names(moments[0]):
            raise ChangeSomething(
                "FILE", f"{path}:{number}", "has other groups than earlier lines", remedy
            )
    if not moments:
        raise ChangeSomething("FILE", path, "holds no step", remedy)
    return moments


def _moment(raw: Any) -> Moment:
    if not isinstance(raw, dict):
        raise TypeError("no object")
    numbers = {f.name: raw[f.name] for f in fields(Moment) if f.name != "groups"}
    if not all(_is_number(value) for value in numbers.values()):
        raise ValueError("a field is not a number of at least 0")
    return Moment(**numbers, groups=tuple(_group(each) for each in raw["groups"]))


def _group(raw: Any) -> GroupMoment:
    sizes = {f.name: raw[f.name] for f in fields(GroupMoment) if f.name != "name"}
    if not all(_is_number(value) for value in sizes.values()):
        raise ValueError("a group's field is not a number of at least 0")
    return GroupMoment(str(raw["name"]), **sizes)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf


def _names(moment: Moment) -> list[str]:
    return [group.name for group in moment.groups]
