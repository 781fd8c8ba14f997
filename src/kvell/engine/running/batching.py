"""The arrays of a forward pass, from a step plan: page tables, positions, write locations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvell.attention.host_batch import HostGroupBatch, HostRows
from kvell.attention.interface import part_sizes
from kvell.engine.requests.plan import NewPages, StepPlan, TokenWork
from kvell.engine.running import _tables
from kvell.memory import GroupKind, GroupSpec
from kvell.pages.rows import CheckpointRow

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
NOTHING_AWAY: Mapping[int, int] = MappingProxyType({})
FIELDS = HostGroupBatch.MADE


class GroupArrays(HostRows):
    """One group's metadata for a step: the fields of attention's ``GroupBatch``, in numpy."""

    @cached_property
    def fields(self) -> dict[str, Ints]:
        return dict(zip(FIELDS, self.arrays, strict=True))

    def __getattr__(self, name: str) -> Ints:
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
        return cls([w.handle for w in work], [w.start for w in work], [w.count for w in work])

    @cached_property
    def positions(self) -> Longs:
        """The positions of all tokens, int64 [T]."""
        return token_positions(np.array(self.starts, np.int64), np.array(self.counts, np.int64))

    @cached_property
    def query_starts(self) -> Ints:
        """The index of each work's first token in the batch, int32 [n+1]."""
        return starts_of(self.counts)


class PageTables:
    """The logical page of each position, per holder and group; updated from plans.

    The tables are compiled (csrc/batching). A forward pass evicts Python from the CPU caches, so
    the cost is the amount of cold code: in numpy a single request would take 0.3 ms.
    """

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self.groups = groups
        self._compiled = _tables.PageTables([_rules(group) for group in groups])
        self._away: Mapping[int, int] = NOTHING_AWAY

    def update(self, plan: StepPlan) -> None:
        """Apply a plan's releases and new pages, and note the remote tokens of its step."""
        self._away = dict(plan.away) if plan.away else NOTHING_AWAY
        if plan.released or len(plan.new_pages):
            self._compiled.update(plan.released, plan.new_pages)

    def table(self, handle: int, group_index: int) -> Ints:
        """Return a holder's page ids in a group, by position; undefined without a page."""
        return self._compiled.pages(handle, group_index)

    def arrays(
        self, group_index: int, work: Sequence[TokenWork], rows: WorkRows | None = None
    ) -> GroupArrays:
        """Return the group's metadata for this work.

        Positions count the tokens that the group has: if it drops prompt tokens, the kept ones.

        :param rows: the rows of this work, if they exist already.
        """
        group = self.groups[group_index]
        rows = WorkRows.of(work) if rows is None else rows
        if group.kind is GroupKind.DROPPING:
            starts = [w.start - _dropped(group, w) for w in work]
            rows = WorkRows(rows.handles, starts, rows.counts)
        return self._arrays(group_index, rows)

    def token_rows(
        self, rows: WorkRows, num_logits: list[int], token_ids: Sequence[Ints]
    ) -> HostRows:
        """Return token ids [T], their positions [T], and the rows that give logits [R]; int64.

        :param num_logits: number of tokens at the end of each work that give logits.
        """
        packed = _tables.token_rows(rows.starts, rows.counts, num_logits, token_ids)
        tokens, wanted = sum(rows.counts), sum(num_logits)
        return HostRows(*packed, [tokens, tokens, wanted])

    def running_states(self, group_index: int, rows: WorkRows) -> HostRows:
        """Return ``query_starts``, ``starts`` and ``page_ids`` of :meth:`states`; int32."""
        slices = self.groups[group_index].slices
        requests = len(rows.handles)
        packed = self._compiled.states(group_index, rows.handles, rows.starts, rows.counts, slices)
        return HostRows(*packed, [requests + 1, requests, requests * slices])

    def states(
        self,
        group_index: int,
        work: Sequence[TokenWork],
        checkpoints: NewPages,
        rows: WorkRows | None = None,
    ) -> StateArrays:
        """Return a state group's metadata.

        :param checkpoints: the plan's checkpoints, also of other groups.
        :param rows: the rows of this work, if they exist already.
        :raises ValueError: if a checkpoint is after a token that this step does not compute.
        """
        group = self.groups[group_index]
        running = [self.table(w.handle, group_index)[: group.slices] for w in work]
        rows = WorkRows.of(work) if rows is None else rows
        starts = np.array(rows.starts, np.int32)
        joined = np.concatenate(running) if running else np.empty(0, np.int32)
        page_ids = joined.reshape(-1, group.slices)
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
            cut_page_ids=np.ascontiguousarray(kept[:, :, CheckpointRow.PAGE]),
            end_page_ids=(
                np.where(drafted[:, None], np.int32(-1), page_ids) if drafted.any() else None
            ),
        )

    def away(self, group_index: int, rows: WorkRows) -> list[int]:
        """Return the number of remote tokens at the start of each work; empty if there are none."""
        if not self._away or self.groups[group_index].kind is not GroupKind.FULL:
            return []
        return [self._away.get(handle, 0) for handle in rows.handles]

    def _arrays(self, group_index: int, rows: WorkRows) -> GroupArrays:
        flat, address = self._compiled.arrays(
            group_index,
            rows.handles,
            rows.starts,
            rows.counts,
            self.away(group_index, rows) if self._away else [],
        )
        requests = len(rows.handles)
        tokens = sum(rows.counts)
        pages = len(flat) - 4 * requests - 2 - 2 * tokens
        return GroupArrays(flat, address, part_sizes(requests, pages, tokens))


def _rules(group: GroupSpec) -> tuple[int, int, int, int]:
    """Return tokens per page, pages per large page, window and chunk in tokens (0: none)."""
    window = group.window_tokens if group.kind is GroupKind.SLIDING else 0
    chunk = group.window_tokens if group.kind is GroupKind.CHUNKED else 0
    return group.page_tokens, group.pages_per_large, window, chunk


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
    part = rows[rows[:, CheckpointRow.GROUP] == group]
    keys = part.T[[CheckpointRow.SLICE, CheckpointRow.END, CheckpointRow.HANDLE]]
    ordered: npt.NDArray[np.int32] = part[np.lexsort(keys)]
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


def starts_of(counts: Sequence[int] | npt.NDArray[np.int64]) -> Ints:
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
