"""The activation region: slots of whole chunks over one range of addresses (eLLM §4.2).

A position of the range::

            fill                 take
    BARE ─────────► IDLE ─────────────────► USED
      ▲              │  ▲                     │
      │ clear        │  └───── release ───────┘
      │              ▼ retire
      └─────────── STALE      still mapped, without owner: unmapped after a fence

Slots are chosen best fit, free neighbours coalesce, and a freed slot stays mapped: the next of its
size costs nothing. The slot that was released last *rests*: its segment stays unchanged until any
other change, since the next step mostly takes it again. Pure: the caller maps and unmaps, and
reports when that is done.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

from kvell.runs import runs


class SlotState(IntEnum):
    """The mapping and owner of a position."""

    BARE = 0
    IDLE = 1
    USED = 2
    STALE = 3


@dataclass(frozen=True)
class Segment:
    """Consecutive positions of one state.

    :param step: that used them last: of idle ones the newest; of stale ones the fence.
    """

    start: int
    count: int
    state: SlotState
    step: int = 0

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_free(self) -> bool:
        return self.state in (SlotState.BARE, SlotState.IDLE)


@dataclass(frozen=True)
class Placement:
    """A possible slot, and its positions without a chunk."""

    start: int
    count: int
    missing: tuple[int, ...]


class SlotSpace:
    """Segments that tile ``num_positions`` positions."""

    def __init__(self, num_positions: int) -> None:
        self.num_positions = num_positions
        self._segments = [Segment(0, num_positions, SlotState.BARE)] if num_positions else []
        self._counts = dict.fromkeys(SlotState, 0) | {SlotState.BARE: num_positions}
        self._resting: Segment | None = None  # idle, but a used one among the segments

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._now())

    def count(self, state: SlotState) -> int:
        return self._counts[state]

    def positions(self, state: SlotState) -> Iterator[int]:
        for segment in self._now():
            if segment.state is state:
                yield from range(segment.start, segment.end)

    # ------------------------------------------------------------------ choosing

    def find(self, count: int) -> Placement | None:
        """Return the cheapest place for ``count`` positions; None if no free run is long enough.

        In this order: the resting slot, if it has that size; the smallest idle segment that is
        large enough; the window of a free run that lacks the fewest chunks, in the smallest run.
        """
        if self._resting is not None and self._resting.count == count:
            return Placement(self._resting.start, count, ())
        segments = self._now()
        idle = [s for s in segments if s.state is SlotState.IDLE and s.count >= count]
        if idle:
            best = min(idle, key=lambda s: (s.count, s.start))
            return Placement(best.start, count, ())
        windows: list[tuple[int, int, int]] = []
        for run in _free_runs(segments):
            length = run[-1].end - run[0].start
            if length >= count:
                windows.extend((_bare(run, at, count), length, at) for at in _windows(run, count))
        if not windows:
            return None
        _, _, start = min(windows)
        bare = [s for s in segments if s.state is SlotState.BARE]
        missing = [range(max(s.start, start), min(s.end, start + count)) for s in bare]
        return Placement(start, count, tuple(chain.from_iterable(missing)))

    def oldest_idle(self, outside: Placement) -> Iterator[int]:
        idle = [s for s in self._now() if s.state is SlotState.IDLE]
        for segment in sorted(idle, key=lambda s: (s.step, -s.start)):
            for position in range(segment.end - 1, segment.start - 1, -1):
                if not outside.start <= position < outside.start + outside.count:
                    yield position

    def due(self, completed_step: int) -> tuple[int, ...]:
        """Return the stale positions that no step after ``completed_step`` can still touch."""
        if not self._counts[SlotState.STALE]:
            return ()
        return tuple(
            position
            for segment in self._segments
            if segment.state is SlotState.STALE and segment.step <= completed_step
            for position in range(segment.start, segment.end)
        )

    # ------------------------------------------------------------------ changing

    def fill(self, positions: Iterable[int]) -> None:
        for start, count in _stretches(positions):
            self._change(start, count, SlotState.BARE, SlotState.IDLE)

    def take(self, start: int, count: int, step: int) -> None:
        resting = self._resting
        if resting is None or (resting.start, resting.count) != (start, count):
            self._change(start, count, SlotState.IDLE, SlotState.USED, step)
            return
        self._segments[self._index(start)] = Segment(start, count, SlotState.USED, step)
        self._resting = None
        self._recount(count, SlotState.IDLE, SlotState.USED)

    def release(self, start: int, count: int, step: int) -> None:
        """Make a slot idle; ``step`` was the last to touch it."""
        self._wake()
        slot = self._segments[self._index(start)]
        if slot.state is not SlotState.USED or (slot.start, slot.count) != (start, count):
            self._change(start, count, SlotState.USED, SlotState.IDLE, step)
            return
        self._resting = Segment(start, count, SlotState.IDLE, step)
        self._recount(count, SlotState.USED, SlotState.IDLE)

    def retire(self, positions: Iterable[int]) -> None:
        for start, count in _stretches(positions):
            self._change(start, count, SlotState.IDLE, SlotState.STALE)

    def clear(self, positions: Iterable[int]) -> None:
        for start, count in _stretches(positions):
            self._change(start, count, SlotState.STALE, SlotState.BARE, 0)

    # ------------------------------------------------------------------ internal

    def _index(self, position: int) -> int:
        if not 0 <= position < self.num_positions:
            raise ValueError(f"there is no position {position}")
        return bisect_right(self._segments, position, key=lambda s: s.start) - 1

    def _now(self) -> list[Segment]:
        resting = self._resting
        if resting is None:
            return self._segments
        return self._changed(SlotState.USED, resting)

    def _wake(self) -> None:
        self._segments = self._now()
        self._resting = None

    def _recount(self, positions: int, old: SlotState, new: SlotState) -> None:
        self._counts[old] -= positions
        self._counts[new] += positions

    def _change(
        self, start: int, count: int, old: SlotState, new: SlotState, step: int | None = None
    ) -> None:
        """Change the state of positions; without ``step``, keep the newest step that used them."""
        self._wake()
        if step is None:
            step = max(s.step for s in self._segments[self._inside(start, count)])
        self._segments = self._changed(old, Segment(start, count, new, step))
        self._recount(count, old, new)

    def _changed(self, old: SlotState, new: Segment) -> list[Segment]:
        """Return the segments with ``new`` in place of positions that must be in state ``old``."""
        among = self._inside(new.start, new.count)
        inside = self._segments[among]
        if inside[-1].end < new.end or any(s.state is not old for s in inside):
            raise ValueError(f"positions {new.start} to {new.end - 1} are not {old.name}")
        head, tail = inside[0], inside[-1]
        pieces = [
            Segment(head.start, new.start - head.start, old, head.step),
            new,
            Segment(new.end, tail.end - new.end, old, tail.step),
        ]
        around = slice(max(0, among.start - 1), among.stop + 1)
        before = self._segments[around.start : among.start]
        after = self._segments[among.stop : around.stop]
        parts = [*before, *(p for p in pieces if p.count), *after]
        return self._segments[: around.start] + _coalesced(parts) + self._segments[around.stop :]

    def _inside(self, start: int, count: int) -> slice:
        first = last = self._index(start)
        while last < len(self._segments) and self._segments[last].start < start + count:
            last += 1
        return slice(first, last)


def _free_runs(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    run: list[Segment] = []
    for segment in segments:
        if segment.is_free:
            run.append(segment)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _stretches(positions: Iterable[int]) -> Iterator[tuple[int, int]]:
    ordered = sorted(positions)
    return ((ordered[start], count) for start, count in runs(ordered))


def _windows(run: list[Segment], count: int) -> set[int]:
    first = run[0].start
    last = run[-1].end - count
    edges = {s.start for s in run} | {s.end - count for s in run}
    return {edge for edge in edges if first <= edge <= last}


def _bare(run: list[Segment], start: int, count: int) -> int:
    return sum(
        max(0, min(s.end, start + count) - max(s.start, start))
        for s in run
        if s.state is SlotState.BARE
    )


def _coalesced(segments: list[Segment]) -> list[Segment]:
    """Merge neighbours in one state; slots in use and different fences stay separate."""
    result: list[Segment] = []
    for segment in segments:
        last = result[-1] if result else None
        if last is not None and _is_one(last, segment):
            step = max(last.step, segment.step)
            result[-1] = Segment(last.start, last.count + segment.count, last.state, step)
        else:
            result.append(segment)
    return result


def _is_one(left: Segment, right: Segment) -> bool:
    if left.state is not right.state or left.state is SlotState.USED:
        return False
    return left.state is not SlotState.STALE or left.step == right.step
