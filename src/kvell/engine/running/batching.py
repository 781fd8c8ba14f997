"""The arrays of a forward pass, from a step plan: page tables, positions, write locations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvell.attention.host_batch import HostGroupBatch, HostRows
from kvell.engine.requests.plan import NewPages, StepPlan, TokenWork
from kvell.memory import GroupKind, GroupSpec, SlotTable, policy_of

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
FEW_ROWS = 64
"""Up to this number of new pages, storing them one by one is faster than sorting them."""
FIELDS = HostGroupBatch.MADE


class GroupArrays(HostRows):
    """One group's metadata for a step: the fields of attention's ``GroupBatch``, in numpy."""

    @cached_property
    def fields(self) -> dict[str, Ints]:
        """The arrays by name, in order."""
        return dict(zip(FIELDS, self.arrays, strict=True))

    def __getattr__(self, name: str) -> Ints:
        """Return a field."""
        if name not in FIELDS:
            raise AttributeError(name)
        return self.fields[name]


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


class WorkRows:
    """The work of a step in the form that every group needs, one number for each work.

    :ivar handles: holder of each work's page tables.
    :ivar starts: position of each work's first token; ``counts`` its number of tokens.
    """

    def __init__(self, handles: list[int], starts: list[int], counts: list[int]) -> None:
        self.handles, self.starts, self.counts = handles, starts, counts

    @classmethod
    def of(cls, work: Sequence[TokenWork]) -> "WorkRows":
        """Make the rows of a step's work."""
        return cls([w.handle for w in work], [w.start for w in work], [w.count for w in work])

    def begun_at(self, starts: list[int]) -> "WorkRows":
        """Return the same work with other start positions, for a group that has dropped tokens."""
        return WorkRows(self.handles, starts, self.counts)

    @cached_property
    def positions(self) -> Longs:
        """The positions of all tokens, int64 [T]."""
        return token_positions(np.array(self.starts, np.int64), np.array(self.counts, np.int64))

    @cached_property
    def query_starts(self) -> Ints:
        """The index of each work's first token in the batch, int32 [n+1]."""
        return _starts(self.counts)


class PageTables:
    """The logical page of each position, per holder and group; updated from plans.

    This is the reference for the compiled tables, and their fallback without a compiler.
    """

    def __init__(self, groups: Sequence[GroupSpec], slots: SlotTable) -> None:
        self.groups = groups
        self._policies = [policy_of(group) for group in groups]
        self.slots = slots
        self._tables: dict[int, list[Ints]] = {}
        self._away: Mapping[int, int] = {}

    def update(self, plan: StepPlan) -> None:
        """Apply a plan's releases and new pages, and note the remote tokens of its step."""
        self._away = dict(plan.away)
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
        """Return a holder's physical page ids in a group, by position; undefined without a page."""
        pages_per_large = self.groups[group_index].pages_per_large
        return self.slots.physical(self._pages(handle, group_index), pages_per_large)

    def arrays(
        self, group_index: int, work: Sequence[TokenWork], rows: WorkRows | None = None
    ) -> GroupArrays:
        """Return the group's metadata for this work, with physical page ids.

        Positions count the tokens that the group has: if it drops prompt tokens, the kept ones.

        :param rows: the rows of this work, if they exist already.
        """
        group = self.groups[group_index]
        rows = WorkRows.of(work) if rows is None else rows
        if group.kind is GroupKind.DROPPING:
            rows = rows.begun_at([w.start - _dropped(group, w) for w in work])
        return self._arrays(group_index, rows)

    def token_rows(
        self, rows: WorkRows, num_logits: list[int], token_ids: Sequence[Ints]
    ) -> HostRows:
        """Return token ids [T], their positions [T], and the rows that give logits [R]; int64.

        :param num_logits: number of tokens at the end of each work that give logits.
        :param token_ids: the token ids of each work.
        """
        logits = np.array(num_logits, np.int64)
        wanted = token_positions(np.cumsum(rows.counts) - logits, logits)
        return HostRows.of([_join(token_ids), rows.positions, wanted], np.int64)

    def running_states(self, group_index: int, rows: WorkRows) -> HostRows:
        """Return ``query_starts``, ``starts`` and ``page_ids`` of :meth:`states`; int32."""
        group = self.groups[group_index]
        running = [self._pages(handle, group_index)[: group.slices] for handle in rows.handles]
        pages = self.slots.physical(_join(running), group.pages_per_large)
        return HostRows.of([rows.query_starts, np.array(rows.starts), pages], np.int32)

    def states(
        self,
        group_index: int,
        work: Sequence[TokenWork],
        checkpoints: NewPages,
        rows: WorkRows | None = None,
    ) -> StateArrays:
        """Return a state group's metadata, with physical page ids.

        :param checkpoints: the plan's checkpoints, also of other groups.
        :param rows: the rows of this work, if they exist already.
        :raises ValueError: if a checkpoint is after a token that this step does not compute.
        """
        group = self.groups[group_index]
        running = [self._pages(w.handle, group_index)[: group.slices] for w in work]
        per_large = group.pages_per_large
        rows = WorkRows.of(work) if rows is None else rows
        starts = np.array(rows.starts, np.int32)
        page_ids = self.slots.physical(_join(running), per_large).reshape(-1, group.slices)
        drafted = np.fromiter((w.proposed > 0 for w in work), np.bool_, len(work))
        kept = _checkpoints_of(checkpoints, group_index, group.slices)
        kept = np.concatenate([kept, _states_before_draft_tokens(work, running, group_index)])
        index_of = {w.handle: index for index, w in enumerate(work)}
        requests = np.asarray([index_of.get(handle, -1) for handle in kept[:, 0, 0]], np.int32)
        tokens = (kept[:, 0, 2] - starts[requests]).astype(np.int32)
        counts = np.array(rows.counts, np.int32)
        if ((requests < 0) | (tokens < 1) | (tokens > counts[requests])).any():
            raise ValueError("a checkpoint is of a token that the step does not compute")
        return StateArrays(
            query_starts=rows.query_starts,
            starts=starts,
            page_ids=page_ids,
            cut_requests=requests,
            cut_tokens=tokens,
            cut_page_ids=self.slots.physical(kept[:, :, 4].flatten(), per_large).reshape(
                -1, group.slices
            ),
            end_page_ids=(
                np.where(drafted[:, None], np.int32(-1), page_ids) if drafted.any() else None
            ),
        )

    def away(self, group_index: int, rows: WorkRows) -> list[int]:
        """Return the number of remote tokens at the start of each work; empty if there are none."""
        if not self._away or self.groups[group_index].kind is not GroupKind.FULL:
            return []
        return [self._away.get(handle, 0) for handle in rows.handles]

    # ------------------------------------------------------ overridden by the compiled tables

    def _pages(self, handle: int, group_index: int) -> Ints:
        """Return a holder's logical page ids in a group, by position."""
        return self._tables[handle][group_index]

    def _arrays(self, group_index: int, rows: WorkRows) -> GroupArrays:
        policy, size = self._policies[group_index], self.groups[group_index].page_tokens
        lengths = np.array(rows.starts, np.int64) + np.array(rows.counts, np.int64)
        firsts = [policy.active_start(start) // size for start in rows.starts]
        if away := self.away(group_index, rows):
            firsts = [max(f, tokens // size) for f, tokens in zip(firsts, away, strict=True)]
        ends = (-(-lengths // size)).tolist()
        tables = [self._pages(handle, group_index) for handle in rows.handles]
        pages = [table[f:e] for table, f, e in zip(tables, firsts, ends, strict=True)]
        page_ids = self.slots.physical(_join(pages), self.groups[group_index].pages_per_large)
        table_starts = _starts([len(p) for p in pages])
        first = np.array(firsts, np.int32)
        row_of_token = np.repeat(table_starts[:-1] - first, rows.counts)
        numbers, offsets = np.divmod(rows.positions, size)
        writes = page_ids[row_of_token + numbers]
        fields = [rows.query_starts, lengths, table_starts, page_ids, first, writes, offsets]
        return GroupArrays.of(fields, np.int32)

    def _put(self, rows: NewPages) -> None:
        """Store new pages of one holder and one group."""
        end = int(rows[:, 2].max()) + 1
        self._table_with(int(rows[0, 0]), int(rows[0, 1]), end)[rows[:, 2]] = rows[:, 3]

    def _table_with(self, handle: int, group: int, length: int) -> Ints:
        """Return a holder's table of a group, grown to at least ``length``."""
        tables = self._tables.get(handle)
        if tables is None:
            tables = self._tables[handle] = [np.full(16, -1, np.int32) for _ in self.groups]
        table = tables[group]
        if length > len(table):
            grown = np.full(max(length, 2 * len(table)), -1, np.int32)
            grown[: len(table)] = table
            tables[group] = table = grown
        return table


def _dropped(group: GroupSpec, work: TokenWork) -> int:
    """Return the number of prompt tokens that the group has dropped before this work."""
    prompt_tokens = work.spec.prompt_tokens
    return 0 if work.start < prompt_tokens else max(0, prompt_tokens - group.window_tokens)


def token_positions(starts: Longs, counts: Longs) -> Longs:
    """Return start_i, start_i+1, … start_i+count_i-1 for every i; int64 [Σ counts]."""
    if (counts == 1).all():
        return starts
    ends = np.cumsum(counts)
    total = int(ends[-1])
    positions: Longs = np.arange(total, dtype=np.int64)
    positions += np.repeat(starts - (ends - counts), counts)
    return positions


def _checkpoints_of(rows: NewPages, group: int, slices: int) -> npt.NDArray[np.int32]:
    """Return one group's rows [c, slices, 5]: state by state, slices in order."""
    part = rows[rows[:, 1] == group]
    ordered: npt.NDArray[np.int32] = part[np.lexsort((part[:, 3], part[:, 2], part[:, 0]))]
    return ordered.reshape(-1, slices, 5)


def _states_before_draft_tokens(
    work: Sequence[TokenWork], running: Sequence[Ints], group: int
) -> npt.NDArray[np.int32]:
    """Return checkpoint rows that save running states, in their own pages, before draft tokens."""
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
