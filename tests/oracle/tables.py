"""Page tables in numpy, simple enough to be the oracle of the compiled ones."""

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from kvell.attention.host_batch import HostRows
from kvell.engine.requests.plan import NewPages, StepPlan
from kvell.engine.running.batching import (
    GroupArrays,
    Ints,
    PageTables,
    WorkRows,
    starts_of,
    token_positions,
)
from kvell.memory import GroupSpec, policy_of

FEW_ROWS = 64
"""Up to this number of new pages, storing them one by one is faster than sorting them."""


class ReferenceTables(PageTables):
    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        super().__init__(groups)
        self._policies = [policy_of(group) for group in groups]
        self._tables: dict[int, list[Ints]] = {}

    @override
    def update(self, plan: StepPlan) -> None:
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

    @override
    def token_rows(
        self, rows: WorkRows, num_logits: list[int], token_ids: Sequence[Ints]
    ) -> HostRows:
        logits = np.array(num_logits, np.int64)
        wanted = token_positions(np.cumsum(rows.counts) - logits, logits)
        return HostRows.of([_join(token_ids), rows.positions, wanted], np.int64)

    @override
    def running_states(self, group_index: int, rows: WorkRows) -> HostRows:
        slices = self.groups[group_index].slices
        running = [self.table(handle, group_index)[:slices] for handle in rows.handles]
        return HostRows.of([rows.query_starts, np.array(rows.starts), _join(running)], np.int32)

    @override
    def table(self, handle: int, group_index: int) -> Ints:
        return self._tables[handle][group_index]

    @override
    def _arrays(self, group_index: int, rows: WorkRows) -> GroupArrays:
        policy, size = self._policies[group_index], self.groups[group_index].page_tokens
        lengths = np.array(rows.starts, np.int64) + np.array(rows.counts, np.int64)
        firsts = [policy.active_start(start) // size for start in rows.starts]
        if away := self.away(group_index, rows):
            firsts = [max(f, tokens // size) for f, tokens in zip(firsts, away, strict=True)]
        ends = (-(-lengths // size)).tolist()
        tables = [self.table(handle, group_index) for handle in rows.handles]
        pages = [table[f:e] for table, f, e in zip(tables, firsts, ends, strict=True)]
        page_ids = _join(pages)
        table_starts = starts_of([len(p) for p in pages])
        first = np.array(firsts, np.int32)
        row_of_token = np.repeat(table_starts[:-1] - first, rows.counts)
        numbers, offsets = np.divmod(rows.positions, size)
        writes = page_ids[row_of_token + numbers]
        fields = [rows.query_starts, lengths, table_starts, page_ids, first, writes, offsets]
        return GroupArrays.of(fields, np.int32)

    def _put(self, rows: NewPages) -> None:
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


def _join(pieces: Sequence[Ints]) -> Ints:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)
