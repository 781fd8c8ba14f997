"""Most tokens that a cache which knew the future could hit: a bound on any eviction policy.

A linear program over the schedule of a run with ample memory. Between two uses, a block of a
prompt, a window's part in it and a state after it may each be kept, also in fractions. At no step
do they take more than the pool has beside what running requests need. Pages have no size, and a
state may be kept at any token of a prompt. A prompt hits a block if all blocks before it and what
it resumes from are kept. Any real policy is a feasible solution; the optimum is the bound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array

from kvell.memory import GroupKind, GroupSpec, policy_of
from kvell.prefix.groups.needs import WINDOWS
from kvell.simulator.replay.replay import Replay
from kvell.simulator.traces.rows import TraceRow


@dataclass(frozen=True)
class Life:
    """A request in a schedule: steps in which it is admitted, answers first, and ends."""

    admitted: int
    answers: int
    ends: int


def lives_of(run: Replay) -> list[Life]:
    """The schedule of a run that served everything."""
    steps = [(r.admitted_step, r.first_token_step, r.finish_step) for r in run.requests]
    return [Life(a or 0, b or 0, c or 0) for a, b, c in steps]


@dataclass
class Program:
    """max gain · x, where A x ≤ b and 0 ≤ x ≤ most; built a variable and a row at a time."""

    gain: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    cells: list[tuple[int, int, float]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def variable(self, gain: float = 0.0, most: float = 1.0) -> int:
        """Add a variable; return its number."""
        self.gain.append(gain)
        self.most.append(most)
        return len(self.gain) - 1

    def at_most(self, limit: float, *terms: tuple[int, float]) -> None:
        """The sum of factor × variable is no more than ``limit``."""
        self.cells.extend((len(self.limits), variable, factor) for variable, factor in terms)
        self.limits.append(limit)

    def best(self) -> float:
        """The largest gain."""
        if not self.gain:
            return 0.0
        rows, columns, factors = zip(*self.cells, strict=True)
        shape = (len(self.limits), len(self.gain))
        matrix = coo_array((factors, (rows, columns)), shape=shape)
        bounds = np.stack([np.zeros(shape[1]), np.asarray(self.most)], axis=1)
        answer = linprog(-np.asarray(self.gain), matrix.tocsr(), self.limits, bounds=bounds)
        if not answer.success:
            raise RuntimeError(f"no bound: {answer.message}")
        return -float(answer.fun)


class Foresight:
    """The program of one trace and schedule.

    :param groups: of the pool; full, window and state groups count.
    :param free_bytes: int64 [steps + 1], by step: the pool less what running requests need.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        rows: Sequence[TraceRow],
        lives: Sequence[Life],
        free_bytes: npt.NDArray[np.int64],
    ) -> None:
        full = [g for g in groups if g.kind is GroupKind.FULL]
        self._token_bytes = sum(g.page_stride_bytes / g.page_tokens for g in full)
        states = [g for g in groups if g.kind is GroupKind.STATE]
        self._state_bytes = sum(g.page_stride_bytes * g.slices for g in states)
        self._windows = [g for g in groups if g.kind in WINDOWS]
        self._rows, self._lives, self._free_bytes = rows, lives, free_bytes
        self._program = Program()
        self._kept: list[tuple[int, int, int, float]] = []  # from step, to step, variable, bytes
        self._held_until: dict[int, int] = {}
        self._windows_until: dict[tuple[int, int], int] = {}
        self._states: dict[int, tuple[int, int | None, int | None]] = {}

    def hit_tokens(self) -> float:
        """The bound: no policy hits more tokens on this schedule."""
        for index in sorted(range(len(self._rows)), key=lambda i: (self._lives[i].admitted, i)):
            self._hit(self._rows[index], self._lives[index])
            self._leave(self._rows[index], self._lives[index])
        self._fill()
        return self._program.best()

    def _hit(self, row: TraceRow, life: Life) -> None:
        """Add what the request could hit, and what must be kept for that."""
        ids, sizes = row.block_ids.tolist(), _sizes(row, row.prompt_tokens - 1)
        pairs = enumerate(zip(ids, sizes, strict=True))
        known = next((i for i, (b, n) in pairs if not n or b not in self._held_until), len(ids))
        hits = [self._program.variable(size) for size in sizes[:known]]
        for here, before in zip(hits[1:], hits, strict=False):
            self._program.at_most(0, (here, 1), (before, -1))
        windows: dict[tuple[int, int], int] = {}
        for depth, hit in enumerate(hits):
            if self._held_until[ids[depth]] < life.admitted:
                taken = sizes[depth] * self._token_bytes
                kept = self._keep(self._held_until[ids[depth]], life.admitted, taken)
                self._program.at_most(0, (hit, 1), (kept, -1))
            ends = [(hit, 1.0), *((after, -1.0) for after in hits[depth + 1 : depth + 2])]
            if self._state_bytes:
                self._resume_state(ids[depth], hit, ends, life)
            for number, group in enumerate(self._windows):
                for part, share in _window(group, sizes, depth):
                    until = self._windows_until[number, ids[part]]
                    if until < life.admitted:
                        if (number, part) not in windows:
                            taken = sizes[part] * group.page_stride_bytes / group.page_tokens
                            windows[number, part] = self._keep(until, life.admitted, taken)
                        kept = windows[number, part]
                        terms = [(variable, factor * share) for variable, factor in ends]
                        self._program.at_most(0, *terms, (kept, -1))

    def _resume_state(
        self, block: int, hit: int, ends: Iterable[tuple[int, float]], life: Life
    ) -> None:
        """A state can be resumed if it was kept since its last user, who had or computed it."""
        since, earlier, passed = self._states[block]
        kept = self._keep(min(since, life.admitted), life.admitted, self._state_bytes)
        self._program.at_most(0, *ends, (kept, -1))
        if earlier is not None and passed is not None:
            self._program.at_most(1, (kept, 1), (earlier, -1), (passed, 1))
        self._states[block] = (life.answers, kept, hit)

    def _keep(self, start: int, end: int, taken_bytes: float) -> int:
        """Add something that may be kept between two steps, wholly or in part."""
        kept = self._program.variable()
        self._kept.append((start, end, kept, taken_bytes))
        return kept

    def _leave(self, row: TraceRow, life: Life) -> None:
        """Note until when the request holds its blocks; windows only while they reach there."""
        end = 0
        for block, size in zip(row.block_ids.tolist(), _sizes(row, row.prompt_tokens), strict=True):
            end += size
            self._held_until[block] = max(self._held_until.get(block, 0), life.ends)
            self._states.setdefault(block, (life.answers, None, None))
            for number, group in enumerate(self._windows):
                left = life.answers + max(0, _behind_at(group, end) - row.prompt_tokens)
                before = self._windows_until.get((number, block), 0)
                self._windows_until[number, block] = max(before, min(left, life.ends))

    def _fill(self) -> None:
        """Bound what is kept at any time by the room, in units that suit the solver."""
        unit_bytes = max((taken for *_, taken in self._kept), default=1.0)
        times = sorted({time for start, end, *_ in self._kept for time in (start, end)})
        changes: dict[int, list[tuple[int, float]]] = {time: [] for time in times}
        for start, end, kept, taken in self._kept:
            if start < end:
                changes[start].append((kept, taken / unit_bytes))
                changes[end].append((kept, -taken / unit_bytes))
        before: list[tuple[int, float]] = []
        for time, until in pairwise(times):
            free = self._free_bytes[time + 1 : until]
            room = float(free.min()) / unit_bytes if len(free) else float("inf")
            taken_now = self._program.variable(most=max(0.0, room))
            self._program.at_most(0, *changes[time], *before, (taken_now, -1))
            before = [(taken_now, 1)]


def _sizes(row: TraceRow, most_tokens: int) -> list[int]:
    """Tokens of each block of a prompt, of its first ``most_tokens``."""
    size = row.block_tokens
    return [max(0, min(size, most_tokens - i * size)) for i in range(len(row.block_ids))]


def _window(group: GroupSpec, sizes: Sequence[int], depth: int) -> Iterable[tuple[int, float]]:
    """Blocks, and the part of each, that a window needs to resume after block ``depth``."""
    ends = np.cumsum(sizes[: depth + 1])
    start = policy_of(group).active_start(int(ends[-1]))
    for part, end in enumerate(ends.tolist()):
        if end > start and sizes[part]:
            yield part, min(1.0, (end - start) / sizes[part])


def _behind_at(group: GroupSpec, end: int) -> int:
    """Tokens computed when a window has moved past ``end``."""
    size = group.window_tokens
    return end + size if group.kind is GroupKind.SLIDING else -(-end // size) * size
