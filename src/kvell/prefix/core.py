"""The memory core in plain Python: obvious, and therefore the oracle of the compiled one.

It also serves where no compiler was.
"""

from collections.abc import Sequence

import numpy as np

from kvell.pages.demand import feasible
from kvell.pages.layout import Layout
from kvell.pages.pool import NO_GROUP, PagePool
from kvell.pages.snapshot import HolderSnapshot, IndexEntry, PoolSnapshot, PoolTotals
from kvell.prefix.evictor import BEHIND_WINDOW, NORMAL, EvictionRule, Evictor, LeastRecentlyUsed
from kvell.prefix.hits import hit_positions, longest_hit
from kvell.prefix.holders import GroupPages, Holder
from kvell.prefix.interface import NEW_PAGE_COLUMNS, Ints
from kvell.prefix.needs import demand_pages, peak_pages
from kvell.prefix.placement import Placer
from kvell.prefix.policies import policy_of
from kvell.prefix.radix import RadixTree, Tokens


class ReferenceCore:
    """:class:`kvell.prefix.interface.MemoryCore` in plain Python."""

    def __init__(self, layout: Layout, rule: EvictionRule | None = None) -> None:
        self.layout = layout
        self._rule = rule or LeastRecentlyUsed()
        self._groups = layout.groups
        self._policies = tuple(policy_of(group) for group in layout.groups)
        self._evictor = Evictor(len(self._groups))
        self._pool = PagePool(layout, self._evictor)
        self._evictor.watch(self._pool)
        self._tree = RadixTree(tuple(group.page_tokens for group in self._groups))
        self._placer = Placer(self._pool, self._evictor, self._tree)
        self._holders: dict[int, Holder] = {}
        self._next_handle = 1
        self._step = 0
        self._hit_tokens = 0
        self._group_hit_tokens = [0] * len(self._groups)

    # ------------------------------------------------------------------ prefixes

    def begin_step(self, step: int) -> None:
        """See :class:`MemoryCore`."""
        if step < self._step:
            raise ValueError(f"steps only grow: {step} after {self._step}")
        self._step = step
        over = [h for h in self._holders.values() if h.lease_until is not None]
        for holder in over:
            if holder.lease_until is not None and holder.lease_until < step:
                self.close(holder.handle, renew=False)

    def peek(self, tokens: Tokens, root: str) -> int:
        """See :class:`MemoryCore`."""
        return self._match(tokens, root)[0]

    def open(
        self, tokens: Tokens, root: str, lease_until: int | None = None, *, reuse: bool = True
    ) -> int:
        """See :class:`MemoryCore`."""
        prompt = np.array(tokens, np.int32)  # a copy: the caller may reuse its buffer
        if not reuse:
            self._placer.evict_unused()
        length, found = self._match(prompt, root)
        length = length if reuse else 0
        path = [node for node, _ in self._tree.walk(root, prompt[:length])]
        node = path[-1] if path else self._tree.root(root)
        groups = []
        for index, (group, policy) in enumerate(zip(self._groups, self._policies, strict=True)):
            positions = hit_positions(group, policy, length)
            pages = [found[index][position] for position in positions]
            for page in pages:
                self._pool.acquire(index, page)
            groups.append(GroupPages(positions.start, pages))
        handle = self._next_handle
        self._next_handle += 1
        self._tree.hold(node)
        self._pool.open_holder(handle)
        self._holders[handle] = Holder(
            handle, root, prompt, node, groups, length, length, length, len(prompt), lease_until
        )
        return handle

    def claim(self, handle: int, expected_tokens: int) -> None:
        """See :class:`MemoryCore`."""
        holder = self._holders[handle]
        holder.lease_until = None
        holder.expected_tokens = expected_tokens
        self._hit_tokens += holder.hit_tokens
        for index, (group, policy) in enumerate(zip(self._groups, self._policies, strict=True)):
            taken = hit_positions(group, policy, holder.hit_tokens)
            self._group_hit_tokens[index] += len(taken) * group.page_tokens

    def hit_tokens(self, handle: int) -> int:
        """See :class:`MemoryCore`."""
        return self._holders[handle].hit_tokens

    def _match(self, tokens: Tokens, root: str) -> tuple[int, list[dict[int, int]]]:
        found: list[dict[int, int]] = [{} for _ in self._groups]
        matched = 0
        for node, length in self._tree.walk(root, tokens):
            matched = length
            for group, pages in enumerate(node.pages):
                size = self._groups[group].page_tokens
                found[group].update(
                    {p: page for p, page in pages.items() if (p + 1) * size <= length}
                )
        limit = min(matched, len(tokens) - 1)
        return longest_hit(self._groups, self._policies, found, limit), found

    # -------------------------------------------------------------------- growth

    def grow(self, handles: Ints, until: Ints) -> tuple[int, Ints]:
        """See :class:`MemoryCore`."""
        rows: list[tuple[int, int, int, int]] = []
        wants = [
            self._missing(self._holders[int(h)], int(u))
            for h, u in zip(handles, until, strict=True)
        ]
        served = self._longest_feasible(wants)
        left = [sum(want[g] for want in wants[:served]) for g in range(len(self._groups))]
        for index in range(served):
            if any(wants[index]):
                holder = self._holders[int(handles[index])]
                rows.extend(self._place(index, holder, wants[index], left))
        return served, _rows(rows)

    def largest(self, handle: int, until: int) -> int:
        """See :class:`MemoryCore`."""
        holder = self._holders[handle]
        low, high = holder.computed, until
        while low < high:
            middle = (low + high + 1) // 2
            if feasible(self._missing(holder, middle), self._pool.supply):
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
        return feasible(need, self._pool.supply)

    def held_pages(self, handle: int) -> Ints:
        """See :class:`MemoryCore`."""
        rows = [
            (0, group, held.first + i, page)
            for group, held in enumerate(self._holders[handle].groups)
            for i, page in enumerate(held.pages)
        ]
        return _rows(rows)

    def _missing(self, holder: Holder, until: int) -> list[int]:
        return [
            max(0, -(-until // group.page_tokens) - held.end)
            for group, held in zip(self._groups, holder.groups, strict=True)
        ]

    def _peak(self, handle: int, until: int, chunk_tokens: int) -> list[int]:
        """Pages the holder will need beyond those it holds, at its worst step up to ``until``."""
        holder = self._holders[handle]
        return [
            max(
                0,
                peak_pages(group, policy, until, chunk_tokens, holder.computed) - len(held.pages),
            )
            for group, policy, held in zip(self._groups, self._policies, holder.groups, strict=True)
        ]

    def _longest_feasible(self, wants: Sequence[Sequence[int]]) -> int:
        total = [0] * len(self._groups)
        for served, want in enumerate(wants):
            total = [a + b for a, b in zip(total, want, strict=True)]
            if any(want) and not feasible(total, self._pool.supply):
                return served
        return len(wants)

    def _place(
        self, index: int, holder: Holder, need: list[int], left: list[int]
    ) -> list[tuple[int, int, int, int]]:
        demand = [
            demand_pages(group, policy, holder.expected_tokens, held.end, n)
            for group, policy, held, n in zip(
                self._groups, self._policies, holder.groups, need, strict=True
            )
        ]
        rows: list[tuple[int, int, int, int]] = []
        for group, pages in enumerate(self._placer.place(holder.handle, need, demand, left)):
            held = holder.groups[group]
            rows.extend((index, group, held.end + i, page) for i, page in enumerate(pages))
            held.pages.extend(pages)
        return rows

    # ------------------------------------------------------------------ progress

    def append(self, handles: Ints, tokens: Ints) -> None:
        """See :class:`MemoryCore`."""
        for handle, token in zip(handles, tokens, strict=True):
            self._holders[int(handle)].generated.append(int(token))

    def advance(self, handles: Ints, computed: Ints) -> None:
        """See :class:`MemoryCore`."""
        for handle, length in zip(handles, computed, strict=True):
            holder = self._holders[int(handle)]
            holder.computed = int(length)
            self._publish(holder)
            self._leave_behind(holder)

    def _publish(self, holder: Holder) -> None:
        size = min(group.page_tokens for group in self._groups)
        length = holder.computed // size * size
        if length <= holder.published:
            return
        node = self._tree.extend(holder.node, holder.published, holder.tokens_to(length))
        self._tree.hold(node)
        self._tree.let_go(holder.node)
        holder.node = node
        for index, (group, policy) in enumerate(zip(self._groups, self._policies, strict=True)):
            pt = group.page_tokens
            held = holder.groups[index]
            for position in range(max(held.first, holder.published // pt), length // pt):
                page = held.pages[position - held.first]
                rank = policy.prefix_length((position + 1) * pt)
                if self._tree.put(node, index, position, page):
                    self._pool.index(index, page, self._rule.key(BEHIND_WINDOW, 0, rank))
        holder.published = length

    def _leave_behind(self, holder: Holder) -> None:
        for index, (group, policy) in enumerate(zip(self._groups, self._policies, strict=True)):
            held = holder.groups[index]
            start = policy.active_start(holder.computed) // group.page_tokens
            count = min(start - held.first, len(held.pages))
            if count > 0:
                self._release(index, held, held.pages[:count], BEHIND_WINDOW)
                del held.pages[:count]
                held.first += count

    def _release(
        self, group: int, held: GroupPages, pages: Sequence[int], rank: int | None
    ) -> None:
        size, policy = self._groups[group].page_tokens, self._policies[group]
        for i, page in enumerate(pages):
            length = policy.prefix_length((held.first + i + 1) * size)
            key = None if rank is None else self._rule.key(rank, self._step, length)
            self._pool.release(group, page, key)

    def close(self, handle: int, *, renew: bool = True) -> None:
        """See :class:`MemoryCore`."""
        holder = self._holders.pop(handle)
        for group, held in enumerate(holder.groups):
            self._release(group, held, held.pages, NORMAL if renew else None)
        self._pool.close_holder(handle)
        self._tree.let_go(holder.node)

    # -------------------------------------------------------------------- looking

    def totals(self) -> PoolTotals:
        """See :class:`MemoryCore`."""
        pool, groups = self._pool, range(len(self._groups))
        by_group = list(zip(pool.group, pool.used, pool.cached, strict=True))
        written = [0 for _ in groups]
        for group, used, count in zip(pool.group, pool.used, pool.written, strict=True):
            written[group] += count if used else 0
        used_pages = [sum(used for g, used, _ in by_group if g == group) for group in groups]
        partial = pool.supply.partial
        return PoolTotals(
            pool.group.count(NO_GROUP),
            tuple(used_pages),
            tuple(sum(cached for g, _, cached in by_group if g == group) for group in groups),
            tuple(self._placer.evicted_pages),
            self._hit_tokens,
            dict(self._placer.rungs),
            tuple(partial[g] + used_pages[g] - written[g] for g in groups),
            tuple(written[g] - used_pages[g] for g in groups),
            tuple(self._group_hit_tokens),
        )

    def snapshot(self) -> PoolSnapshot:
        """See :class:`MemoryCore`."""
        pool = self._pool
        supply = pool.supply
        return PoolSnapshot(
            group=tuple(pool.group),
            owner=tuple(pool.owner),
            used=tuple(pool.used),
            cached=tuple(pool.cached),
            empty_masks=tuple(pool.empty_mask),
            refs=tuple(dict(refs) for refs in pool.refs),
            keys=tuple(dict(keys) for keys in pool.indexed),
            whole=supply.whole,
            partial=supply.partial,
            holders=tuple(
                HolderSnapshot(
                    h.handle,
                    h.computed,
                    h.published,
                    h.lease_until is not None,
                    tuple((held.first, tuple(held.pages)) for held in h.groups),
                )
                for h in self._holders.values()
            ),
            index=tuple(
                IndexEntry(group, page, position, node.start, node.end)
                for group, page, node, position in self._tree.named()
            ),
            num_nodes=sum(1 for _ in self._tree.nodes()),
            evicted_pages=tuple(self._placer.evicted_pages),
            hit_tokens=self._hit_tokens,
            rungs=dict(self._placer.rungs),
        )


def _rows(rows: list[tuple[int, int, int, int]]) -> Ints:
    return np.asarray(rows, np.int32).reshape(-1, NEW_PAGE_COLUMNS)
