"""From a step plan to the arrays of a forward pass: tables, positions, where to write."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvell.engine.plan import NewPages, StepPlan, TokenWork
from kvell.memory import GroupKind, GroupSpec, SlotTable, policy_of

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
FEW_ROWS = 64
"""New pages that are put one by one sooner than sorted."""


@dataclass(frozen=True)
class GroupArrays:
    """One group's metadata for a step: the fields of attention's ``GroupBatch``, in numpy."""

    query_starts: Ints
    context_lens: Ints
    table_starts: Ints
    page_ids: Ints
    first_positions: Ints
    write_page_ids: Ints
    write_offsets: Ints


@dataclass(frozen=True)
class StateArrays:
    """A state group's metadata for a step: the fields of attention's ``StateBatch``, in numpy."""

    query_starts: Ints
    starts: Ints
    page_ids: Ints
    cut_requests: Ints
    cut_tokens: Ints
    cut_page_ids: Ints
    end_page_ids: Ints | None


@dataclass(frozen=True)
class WorkRows:
    """What every group of a step needs to know of its work.

    :param starts: int64 [n], where each work starts.
    :param counts: int64 [n], tokens of each.
    :param positions: int64 [T], of all tokens.
    :param query_starts: int32 [n+1], where each work's tokens start among all.
    """

    starts: Longs
    counts: Longs
    positions: Longs
    query_starts: Ints

    @classmethod
    def of(cls, work: Sequence[TokenWork]) -> "WorkRows":
        """Of a step's work."""
        starts = np.fromiter([w.start for w in work], np.int64, len(work))
        counts = np.fromiter([w.count for w in work], np.int64, len(work))
        return cls(starts, counts, token_positions(starts, counts), _starts(counts))

    def begun_at(self, begins: Longs) -> "WorkRows":
        """The same work, in the tokens that a group has."""
        positions = token_positions(begins, self.counts)
        return WorkRows(begins, self.counts, positions, self.query_starts)


class PageTables:
    """Which logical page holds which position, per holder and group; fed by plans."""

    def __init__(self, groups: Sequence[GroupSpec], slots: SlotTable) -> None:
        self._groups = groups
        self._policies = [policy_of(group) for group in groups]
        self._slots = slots
        self._tables: dict[int, list[Ints]] = {}

    def update(self, plan: StepPlan) -> None:
        """Take in what a plan released and allocated."""
        for handle in plan.released:
            self._tables.pop(handle, None)
        rows = plan.new_pages
        if len(rows) <= FEW_ROWS:
            for handle, group, position, page in rows.tolist():
                self._table_with(handle, group, position + 1)[position] = page
        else:
            order = np.lexsort((rows[:, 1], rows[:, 0]))
            rows = rows[order]
            changes = np.flatnonzero((np.diff(rows[:, 0]) != 0) | (np.diff(rows[:, 1]) != 0)) + 1
            for run in np.split(rows, changes):
                self._put(run)

    def table(self, handle: int, group_index: int) -> Ints:
        """Physical page ids of a holder in a group, by position; undefined where it has none."""
        pages_per_large = self._groups[group_index].pages_per_large
        return self._slots.physical(self._tables[handle][group_index], pages_per_large)

    def arrays(
        self, group_index: int, work: Sequence[TokenWork], rows: WorkRows | None = None
    ) -> GroupArrays:
        """The group's metadata for this work, with physical page ids.

        Positions count the tokens that the group has: of a prompt that was cut to a budget,
        those that were kept.

        :param rows: of this work, if somebody has made them.
        """
        group, policy = self._groups[group_index], self._policies[group_index]
        size = group.page_tokens
        rows = WorkRows.of(work) if rows is None else rows
        if group.kind is GroupKind.DROPPING:
            dropped = np.array([_dropped(group, w) for w in work], np.int64)
            rows = rows.begun_at(rows.starts - dropped)
        begins, lengths = rows.starts.tolist(), rows.starts + rows.counts
        firsts = [policy.active_start(begin) // size for begin in begins]
        ends = (-(-lengths // size)).tolist()
        tables = [self._tables[w.handle][group_index] for w in work]
        pages = [table[f:e] for table, f, e in zip(tables, firsts, ends, strict=True)]
        page_ids = self._slots.physical(_join(pages), group.pages_per_large)
        table_starts = _starts([len(p) for p in pages])
        first = np.array(firsts, np.int32)
        row_of_token = np.repeat(table_starts[:-1] - first, rows.counts)
        numbers, offsets = np.divmod(rows.positions, size)
        return GroupArrays(
            query_starts=rows.query_starts,
            context_lens=lengths.astype(np.int32),
            table_starts=table_starts,
            page_ids=page_ids,
            first_positions=first,
            write_page_ids=page_ids[row_of_token + numbers],
            write_offsets=offsets.astype(np.int32),
        )

    def states(
        self,
        group_index: int,
        work: Sequence[TokenWork],
        checkpoints: NewPages,
        rows: WorkRows | None = None,
    ) -> StateArrays:
        """A state group's metadata, with physical page ids.

        :param checkpoints: the plan's; those of other groups are left out.
        :param rows: of this work, if somebody has made them.
        :raises ValueError: if a checkpoint is of no token of this step.
        """
        group = self._groups[group_index]
        running = [self._tables[w.handle][group_index][: group.slices] for w in work]
        kept = _checkpoints_of(checkpoints, group_index, group.slices)
        kept = np.concatenate([kept, _states_before_guesses(work, running, group_index)])
        index_of = {w.handle: index for index, w in enumerate(work)}
        requests = np.asarray([index_of.get(handle, -1) for handle in kept[:, 0, 0]], np.int32)
        rows = WorkRows.of(work) if rows is None else rows
        starts = rows.starts.astype(np.int32)
        tokens = (kept[:, 0, 2] - starts[requests]).astype(np.int32)
        if ((requests < 0) | (tokens < 1) | (tokens > rows.counts[requests])).any():
            raise ValueError("a checkpoint is of a token that the step does not compute")
        per_large = group.pages_per_large
        page_ids = self._slots.physical(_join(running), per_large).reshape(-1, group.slices)
        guessed = np.fromiter((w.proposed > 0 for w in work), np.bool_, len(work))
        return StateArrays(
            query_starts=rows.query_starts,
            starts=starts,
            page_ids=page_ids,
            cut_requests=requests,
            cut_tokens=tokens,
            cut_page_ids=self._slots.physical(kept[:, :, 4].flatten(), per_large).reshape(
                -1, group.slices
            ),
            end_page_ids=(
                np.where(guessed[:, None], np.int32(-1), page_ids) if guessed.any() else None
            ),
        )

    def _put(self, rows: NewPages) -> None:
        """Rows of one holder and one group."""
        end = int(rows[:, 2].max()) + 1
        self._table_with(int(rows[0, 0]), int(rows[0, 1]), end)[rows[:, 2]] = rows[:, 3]

    def _table_with(self, handle: int, group: int, length: int) -> Ints:
        """A holder's table of a group, at least so long."""
        tables = self._tables.get(handle)
        if tables is None:
            tables = self._tables[handle] = [np.full(16, -1, np.int32) for _ in self._groups]
        table = tables[group]
        if length > len(table):
            grown = np.full(max(length, 2 * len(table)), -1, np.int32)
            grown[: len(table)] = table
            tables[group] = table = grown
        return table


def _dropped(group: GroupSpec, work: TokenWork) -> int:
    """Tokens of the prompt that the group no longer has before this work."""
    if work.start < work.prompt_tokens:
        return 0
    return max(0, work.prompt_tokens - group.window_tokens)


def token_positions(starts: Longs, counts: Longs) -> Longs:
    """start_i, start_i+1, … start_i+count_i-1 for every i, concatenated; int64 [Σ counts]."""
    if (counts == 1).all():
        return starts
    ends = np.cumsum(counts)
    total = int(ends[-1])
    positions: Longs = np.arange(total, dtype=np.int64)
    positions += np.repeat(starts - (ends - counts), counts)
    return positions


def _checkpoints_of(rows: NewPages, group: int, slices: int) -> npt.NDArray[np.int32]:
    """One group's rows [c, slices, 5], a state after the other, slices in order."""
    own = rows[rows[:, 1] == group]
    ordered: npt.NDArray[np.int32] = own[np.lexsort((own[:, 3], own[:, 2], own[:, 0]))]
    return ordered.reshape(-1, slices, 5)


def _states_before_guesses(
    work: Sequence[TokenWork], running: Sequence[Ints], group: int
) -> npt.NDArray[np.int32]:
    """A running state goes on over the known tokens only: rows as of checkpoints, its own pages."""
    slices = len(running[0]) if running else 0
    rows = [
        [(w.handle, group, w.start + w.known, part, page) for part, page in enumerate(pages)]
        for w, pages in zip(work, running, strict=True)
        if w.proposed and w.known
    ]
    return np.asarray(rows, np.int32).reshape(-1, slices, 5)


def _join(pieces: Sequence[Ints]) -> Ints:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)


def _starts(counts: Sequence[int] | npt.NDArray[np.int64]) -> Ints:
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
