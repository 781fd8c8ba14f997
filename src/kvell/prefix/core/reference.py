"""The memory core in plain Python: obvious, and therefore the oracle of the compiled one.

It also serves where no compiler was.
"""

from collections.abc import Sequence

import numpy as np

from kvell.pages.demand import feasible
from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.pages.snapshot import PoolSnapshot, PoolTotals
from kvell.prefix.core.looking import (
    Counters,
    empty_large_of,
    large_pages_of,
    small_pages_of,
    snapshot_of,
    totals_of,
)
from kvell.prefix.core.lookup import known, match, reach, resume, resume_embeddings
from kvell.prefix.core.publishing import Publisher
from kvell.prefix.core.receiving import Receiver
from kvell.prefix.core.reserving import adopt, delete, reserve
from kvell.prefix.eviction.checkpoints import cuts, is_worth_displacing, waypoint_tokens
from kvell.prefix.eviction.evictor import COARSE, EvictionRule, LeastRecentlyUsed
from kvell.prefix.groups.facts import Images, facts_of
from kvell.prefix.groups.needs import demand_pages, end_position, peak_pages
from kvell.prefix.index.changes import CHANGE_COLUMNS
from kvell.prefix.index.hits import alignment_tokens
from kvell.prefix.index.radix import Tokens
from kvell.prefix.interface import (
    CHECKPOINT_COLUMNS,
    COPY_COLUMNS,
    NEW_PAGE_COLUMNS,
    NO_REACH,
    SOURCE_COLUMNS,
    Ints,
    LongInts,
)
from kvell.prefix.placement.compaction import Compactor
from kvell.prefix.placement.holders import Checkpoint, GroupPages, Holder
from kvell.prefix.placement.lending import Lender
from kvell.prefix.placement.store import Store


class ReferenceCore:
    """:class:`kvell.prefix.interface.MemoryCore` in plain Python."""

    def __init__(self, layout: Layout, rule: EvictionRule | None = None) -> None:
        self._store = Store(layout, rule or LeastRecentlyUsed())
        self._publisher = Publisher(self._store)
        self._receiver = Receiver(self._store, self._publisher)
        self._compactor = Compactor(self._store)
        self._lender = Lender(self._store)
        self._holders: dict[int, Holder] = {}
        self._next_handle = 1
        self._hit_tokens = 0
        self._group_hit_tokens = [0] * len(layout.groups)
        self._copies: list[tuple[int, ...]] = []

    @property
    def layout(self) -> Layout:
        """See :class:`MemoryCore`."""
        return self._store.layout

    def register(self, groups: Sequence[GroupSpec]) -> None:
        """See :class:`MemoryCore`."""
        self._store.register(groups)
        self._group_hit_tokens.extend([0] * len(groups))
        self._publisher.checkpoint_pages.extend([0] * len(groups))
        for holder in self._holders.values():
            holder.groups.extend(GroupPages(0, []) for _ in groups)

    # ------------------------------------------------------------------ prefixes

    def begin_step(self, step: int) -> None:
        """See :class:`MemoryCore`."""
        if step < self._store.step:
            raise ValueError(f"steps only grow: {step} after {self._store.step}")
        self._store.evictor.now = step
        over = [h for h in self._holders.values() if h.lease_until is not None]
        for holder in over:
            if holder.lease_until is not None and holder.lease_until < step:
                self.close(holder.handle, renew=False)

    def peek(
        self,
        tokens: Tokens,
        root: str,
        *,
        images: Images | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> int:
        """See :class:`MemoryCore`."""
        facts = facts_of(len(tokens), prompt_tokens, images)
        return match(self._store, tokens, _root(model, root), facts, self._store.own(model))[0]

    def known(self, tokens: Tokens, root: str, *, model: str = "") -> Ints:
        """See :class:`MemoryCore`."""
        rows = known(self._store, tokens, _root(model, root), self._store.own(model))
        return _rows(rows, SOURCE_COLUMNS)

    def open(
        self,
        tokens: Tokens,
        root: str,
        lease_until: int | None = None,
        *,
        reuse: bool = True,
        images: Images | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> int:
        """See :class:`MemoryCore`."""
        facts, own = facts_of(len(tokens), prompt_tokens, images), self._store.own(model)
        root = _root(model, root)
        prompt = np.array(tokens, np.int32)  # a copy: the caller may reuse its buffer
        if not reuse:
            self._store.placer.evict_unused()
        length, matched, found = match(self._store, prompt, root, facts, own)
        length = length if reuse else 0
        path = [node for node, _ in self._store.tree.walk(root, prompt[:length])]
        node = path[-1] if path else self._store.tree.root(root)
        groups = [GroupPages(0, []) for _ in self._store.groups]
        for index in own:
            if self._store.groups[index].kind is GroupKind.VISION:
                groups[index] = resume_embeddings(self._store, index, prompt, root, facts, length)
            else:
                groups[index] = resume(self._store, index, facts, length, found[index])
        handle = self._next_handle
        self._next_handle += 1
        self._store.tree.hold(node)
        self._store.pool.open_holder(handle)
        self._holders[handle] = Holder(
            handle,
            root,
            prompt,
            facts,
            own,
            node,
            groups,
            length,
            matched if reuse else 0,
            len(prompt),
            lease_until,
            renewed_step=self._store.step,
        )
        return handle

    def claim(self, handle: int, expected_tokens: int, *, will_return: bool | None = None) -> None:
        """See :class:`MemoryCore`."""
        holder = self._holders[handle]
        if holder.is_reservation:
            raise ValueError(f"handle {handle} has no text to compute")
        holder.will_return = will_return
        holder.lease_until = None
        holder.is_claimed = True
        holder.expected_tokens = expected_tokens
        self._hit_tokens += holder.hit_tokens
        self._store.placer.hits.note(holder.hit_tokens, len(holder.tokens))
        self._publisher.note_used(holder)
        for index, held in holder.own_groups():
            group = self._store.groups[index]
            if group.kind.counts_tokens and group.required_for_hit:
                taken = holder.hit_tokens - held.first * group.page_tokens
                self._group_hit_tokens[index] += max(0, taken)

    def hit_tokens(self, handle: int) -> int:
        """See :class:`MemoryCore`."""
        return self._holders[handle].hit_tokens

    def receive(self, handle: int, computed: int) -> None:
        """See :class:`MemoryCore`."""
        holder = self._holders[handle]
        most = holder.num_tokens - (holder.lease_until is None)
        if not holder.hit_tokens <= computed <= most:
            raise ValueError(f"{computed} tokens cannot come behind {holder.hit_tokens}")
        if holder.is_reservation or self._receiver.cannot(holder, computed):
            raise ValueError(f"handle {handle} cannot receive what it computes")
        self._receiver.receive(holder, computed)

    def sources(self, handle: int) -> Ints:
        """See :class:`HoldingCore`."""
        rows = [
            (group, position, page, place[0])
            for group, held in self._holders[handle].own_groups()
            for position, (place, page) in sorted(held.sources.items())
        ]
        return _rows(rows, SOURCE_COLUMNS)

    def reserve(self, counts: Ints, lease_until: int, *, model: str = "") -> int:
        """See :class:`HoldingCore`."""
        reserved = reserve(self._store, self._next_handle, counts.tolist(), model, lease_until)
        if reserved is None:
            return 0
        self._holders[self._next_handle] = reserved
        self._next_handle += 1
        return reserved.handle

    def adopt(
        self, handle: int, tokens: Tokens, root: str, *, prompt_tokens: int | None = None
    ) -> None:
        """See :class:`HoldingCore`."""
        adopt(self._store, self._holders[handle], tokens, root, prompt_tokens)

    def delete(self, tokens: Tokens, root: str, *, model: str = "") -> int:
        """See :class:`HoldingCore`."""
        self._store.own(model)
        return delete(self._store, tokens, _root(model, root))

    # -------------------------------------------------------------------- growth

    def grow(self, handles: Ints, until: Ints) -> tuple[int, Ints]:
        """See :class:`MemoryCore`."""
        rows: list[tuple[int, ...]] = []
        wants = [
            self._missing(self._holders[int(h)], int(u))
            for h, u in zip(handles, until, strict=True)
        ]
        served = self._longest_feasible(wants)
        left = [sum(want[g] for want in wants[:served]) for g in range(len(self._store.groups))]
        for index in range(served):
            if any(wants[index]):
                holder = self._holders[int(handles[index])]
                rows.extend(self._place(index, holder, wants[index], left))
        return served, _rows(rows, NEW_PAGE_COLUMNS)

    def copies(self) -> Ints:
        """See :class:`MemoryCore`."""
        rows, self._copies = self._copies, []
        return _rows(rows, COPY_COLUMNS)

    def largest(self, handle: int, until: int) -> int:
        """See :class:`MemoryCore`."""
        holder = self._holders[handle]
        if holder.computed < holder.facts.prompt_tokens and self._publisher.drops(holder):
            until = min(until, holder.facts.prompt_tokens)
        low, high = holder.computed, until
        while low < high:
            middle = (low + high + 1) // 2
            if feasible(self._missing(holder, middle), self._store.pool.supply):
                low = middle
            else:
                high = middle - 1
        return low

    def fits(
        self, handle: int, until: int, chunk_tokens: int, others: Ints, others_until: Ints
    ) -> bool:
        """See :class:`MemoryCore`."""
        need = self._peak(handle, until, chunk_tokens)
        for other, length in zip(others, others_until, strict=True):
            more = self._peak(int(other), int(length), 1)
            need = [a + b for a, b in zip(need, more, strict=True)]
        return feasible(need, self._store.pool.supply)

    def may_fit(self) -> bool:
        """Whoever wants to know may ask."""
        return True

    def held_pages(self, handle: int) -> Ints:
        """See :class:`MemoryCore`."""
        rows = [
            (0, group, held.first + i, page)
            for group, held in enumerate(self._holders[handle].groups)
            for i, page in enumerate(held.pages)
        ]
        return _rows(rows, NEW_PAGE_COLUMNS)

    def _missing(self, holder: Holder, until: int) -> list[int]:
        need = [0] * len(self._store.groups)
        for index, held in holder.own_groups():
            end = end_position(self._store.groups[index], holder.facts, until, holder.computed)
            need[index] = max(0, end - held.end)
        return need

    def _peak(self, handle: int, until: int, chunk_tokens: int) -> list[int]:
        """Pages the holder will need beyond those it holds, at its worst step up to ``until``."""
        holder = self._holders[handle]
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

    def _place(
        self, index: int, holder: Holder, need: list[int], left: list[int]
    ) -> list[tuple[int, ...]]:
        demand = [
            demand_pages(group, holder.facts, holder.expected_tokens, held.end, n)
            for group, held, n in zip(self._store.groups, holder.groups, need, strict=True)
        ]
        rows: list[tuple[int, ...]] = []
        for group, pages in enumerate(self._store.placer.place(holder.handle, need, demand, left)):
            held = holder.groups[group]
            for position, page in enumerate(pages, start=held.end):
                rows.append((index, group, position, page))
                if position in held.sources:
                    self._copies.append((holder.handle, group, held.sources[position][1], page))
            held.pages.extend(pages)
        return rows

    # --------------------------------------------------------------- checkpoints

    def checkpoint(self, handles: Ints, until: Ints) -> Ints:
        """See :class:`MemoryCore`."""
        rows: list[tuple[int, ...]] = []
        for index, (handle, end) in enumerate(zip(handles, until, strict=True)):
            holder = self._holders[int(handle)]
            for group in holder.own:
                if self._store.groups[group].kind is GroupKind.STATE and self._publisher.publishes(
                    holder
                ):
                    rows.extend((index, *row) for row in self._keep_states(holder, group, int(end)))
        return _rows(rows, CHECKPOINT_COLUMNS)

    def _keep_states(self, holder: Holder, group: int, until: int) -> list[tuple[int, ...]]:
        """Reserve pages for the states worth keeping, the most valuable first."""
        own = [self._store.groups[index] for index in holder.own]
        alignment = alignment_tokens(own)
        positions = cuts(
            holder.computed,
            until,
            holder.facts.prompt_tokens,
            holder.matched_tokens,
            alignment,
            waypoint_tokens(own, alignment, holder.facts.prompt_tokens),
        )
        rows: list[tuple[int, ...]] = []
        spec = self._store.groups[group]
        ranked = [(self._store.usefulness.rank(sort), cut, sort) for cut, sort in positions]
        for asked, cut, sort in sorted(ranked, reverse=True):
            worth = is_worth_displacing(spec, own, cut - holder.hit_tokens)
            rank = asked if worth else min(asked, COARSE)
            limit = self._store.rule.limit(rank, self._store.step)
            pages = self._store.placer.keep(group, spec.slices, rank, limit)
            if pages is not None:
                holder.checkpoints.append(Checkpoint(group, cut, sort, rank, tuple(pages)))
                rows.extend((group, cut, part, page) for part, page in enumerate(pages))
        return rows

    def compact(self, most_large: int) -> Ints:
        """See :class:`MemoryCore`."""
        rows: list[tuple[int, ...]] = []
        holders = list(self._holders.values())
        for holder, group, position, old, new in self._compactor.compact(holders, most_large):
            rows.append((holder.handle, group, position, new))
            self._copies.append((holder.handle, group, old, new))
        return _rows(rows, NEW_PAGE_COLUMNS)

    # ------------------------------------------------------------------ progress

    def append(self, handles: Ints, tokens: Ints) -> None:
        """See :class:`MemoryCore`."""
        for handle, token in zip(handles, tokens, strict=True):
            self._holders[int(handle)].generated.append(int(token))

    def advance(self, handles: Ints, computed: Ints) -> None:
        """See :class:`MemoryCore`."""
        for handle, length in zip(handles, computed, strict=True):
            holder = self._holders[int(handle)]
            self._publisher.advance(holder, int(length))

    def close(self, handle: int, *, renew: bool = True, returns: bool = False) -> None:
        """See :class:`MemoryCore`."""
        holder = self._holders.pop(handle)
        self._publisher.give_back(holder, renew=renew, returns=returns)
        self._store.pool.close_holder(handle)
        self._store.tree.let_go(holder.node)
        # How often one was turned away shows in no plan.
        if handle == self._next_handle - 1 and not holder.is_claimed and holder.lease_until is None:
            self._next_handle -= 1

    # ------------------------------------------------- memory that others have

    def reclaim_order(self) -> LongInts:
        """See :class:`LendingCore`."""
        return self._lender.reclaim_order()

    def withhold(self, larges: Ints) -> None:
        """See :class:`LendingCore`."""
        self._lender.withhold(larges)

    def restore(self, larges: Ints) -> None:
        """See :class:`LendingCore`."""
        self._lender.restore(larges)

    # -------------------------------------------------------------------- looking

    def watch_index(self) -> None:
        """See :class:`HoldingCore`."""
        self._store.changes.watch()

    def index_changes(self) -> Ints:
        """See :class:`HoldingCore`."""
        return _rows(self._store.changes.taken(), CHANGE_COLUMNS)

    def empty_large_pages(self) -> int:
        """See :class:`MemoryCore`."""
        return empty_large_of(self._store)

    def evicted_pages(self) -> tuple[int, ...]:
        """See :class:`MemoryCore`."""
        return tuple(self._store.placer.evicted_pages)

    def totals(self) -> PoolTotals:
        """See :class:`MemoryCore`."""
        counted = Counters(
            self._hit_tokens, self._group_hit_tokens, self._publisher.checkpoint_pages
        )
        return totals_of(self._store, counted)

    def snapshot(self) -> PoolSnapshot:
        """See :class:`MemoryCore`."""
        return snapshot_of(self._store, self._holders.values(), self._hit_tokens)

    def large_pages(self) -> LongInts:
        """See :class:`VisibleCore`."""
        return large_pages_of(self._store)

    def small_pages(self, large: int) -> LongInts:
        """See :class:`VisibleCore`."""
        return small_pages_of(self._store, large)

    def reach(
        self,
        tokens: Tokens,
        root: str,
        *,
        images: Images | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> LongInts:
        """See :class:`VisibleCore`."""
        facts, own = facts_of(len(tokens), prompt_tokens, images), self._store.own(model)
        lengths = reach(self._store, tokens, _root(model, root), facts, own)
        groups = range(len(self._store.groups))
        return np.asarray([lengths.get(index, NO_REACH) for index in groups], np.int64)


def _root(model: str, root: str) -> str:
    return f"{model}/{root}"


def _rows(rows: Sequence[tuple[int, ...]], columns: int) -> Ints:
    return np.asarray(rows, np.int32).reshape(-1, columns)
