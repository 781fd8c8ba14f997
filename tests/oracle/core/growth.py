"""Pages for the tokens of a step, for all holders together (like ``csrc/memory/growth``)."""

from collections.abc import Sequence

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.prefix.groups.facts import Facts
from kvell.prefix.groups.needs import WINDOWS, end_position, peak_pages
from kvell.prefix.groups.policies import policy_of
from tests.oracle.pages.demand import feasible
from tests.oracle.placement.holders import Holder
from tests.oracle.placement.store import Store


def returning_pages(group: GroupSpec, facts: Facts, held_first: int) -> int:
    """Return the number of pages before the held ones that are missing, being no longer remote."""
    if group.kind is not GroupKind.FULL or not held_first:
        return 0
    return held_first - facts.away_tokens // group.page_tokens


def demand_pages(
    group: GroupSpec, facts: Facts, expected_tokens: int, held_end: int, need: int
) -> int:
    """Return how many more pages a holder is expected to need; it needs ``need`` of them now.

    Groups that release pages before a window never need more than they keep.
    """
    rest = end_position(group, facts, expected_tokens) - held_end
    if group.kind in WINDOWS:
        kept = policy_of(group).most_kept_tokens(expected_tokens)
        rest = min(rest, -(-kept // group.page_tokens) + 1)
    return max(need, rest)


Rows = list[tuple[int, ...]]


class Growth:
    """The computation of holders' missing pages, and their placement.

    :ivar copies: copy-on-write copies not yet reported: handle, group, source, target.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.copies: Rows = []

    def grow(self, requests: Sequence[tuple[Holder, int]]) -> tuple[int, Rows]:
        """Place the missing pages of the longest feasible run of holders from the front.

        :param requests: holders, each with its number of tokens.
        :returns: the number of holders served, and their new pages: index, group, position, page.
        """
        rows: Rows = []
        wants = [self._missing(holder, until) for holder, until in requests]
        served = self._longest_feasible(wants)
        left = [sum(want[g] for want in wants[:served]) for g in range(len(self._store.groups))]
        for index in range(served):
            if any(wants[index]):
                rows.extend(self._place(index, requests[index][0], wants[index], left))
        return served, rows

    def largest(self, holder: Holder, until: int) -> int:
        """Return the most tokens up to ``until`` for which there are pages."""
        low, high = holder.computed, until
        while low < high:
            middle = (low + high + 1) // 2
            if feasible(self._missing(holder, middle), self._store.pool.supply):
                low = middle
            else:
                high = middle - 1
        return low

    def fits(
        self, holder: Holder, until: int, chunk_tokens: int, others: Sequence[tuple[Holder, int]]
    ) -> bool:
        need = self._peak(holder, until, chunk_tokens)
        for other, length in others:
            more = self._peak(other, length, 1)
            need = [a + b for a, b in zip(need, more, strict=True)]
        return feasible(need, self._store.pool.supply)

    def _missing(self, holder: Holder, until: int) -> list[int]:
        need = [0] * len(self._store.groups)
        for index, held in holder.own_groups():
            end = end_position(self._store.groups[index], holder.facts, until, holder.computed)
            need[index] = max(0, end - held.end) + self._returning(holder, index)
        return need

    def _returning(self, holder: Holder, index: int) -> int:
        """Return the pages that the holder misses before its first one, for tokens copied back."""
        return returning_pages(self._store.groups[index], holder.facts, holder.groups[index].first)

    def _peak(self, holder: Holder, until: int, chunk_tokens: int) -> list[int]:
        """Return the pages that the holder needs beyond the held ones at its peak to ``until``."""
        need = [0] * len(self._store.groups)
        for index, held in holder.own_groups():
            peak = peak_pages(
                self._store.groups[index], holder.facts, until, chunk_tokens, holder.computed
            )
            need[index] = max(0, peak - len(held.pages))
        return need

    def _longest_feasible(self, wants: Sequence[Sequence[int]]) -> int:
        total = [0] * len(self._store.groups)
        for served, want in enumerate(wants):
            total = [a + b for a, b in zip(total, want, strict=True)]
            if any(want) and not feasible(total, self._store.pool.supply):
                return served
        return len(wants)

    def _place(self, index: int, holder: Holder, need: list[int], left: list[int]) -> Rows:
        before = [self._returning(holder, g) for g in range(len(need))]
        demand = [
            demand_pages(group, holder.facts, holder.expected_tokens, held.end - some, n)
            for group, held, some, n in zip(
                self._store.groups, holder.groups, before, need, strict=True
            )
        ]
        rows: Rows = []
        for group, pages in enumerate(self._store.placer.place(holder.handle, need, demand, left)):
            held = holder.groups[group]
            for position, page in zip(held.add(pages, before[group]), pages, strict=True):
                rows.append((index, group, position, page))
                if position in held.sources:
                    self.copies.append((holder.handle, group, held.sources[position][1], page))
        return rows
