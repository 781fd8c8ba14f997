"""The memory core in plain Python, simple enough to be the oracle of the compiled core.

It also serves installations without a compiler.
"""

from collections.abc import Sequence

import numpy as np

from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.pages.snapshot import PoolSnapshot, PoolTotals
from kvell.prefix.eviction.checkpoints import is_worth_displacing
from kvell.prefix.groups.facts import Images, facts_of
from kvell.prefix.groups.needs import alignment_tokens
from kvell.prefix.interface import (
    NO_REACH,
    Ints,
    LongInts,
)
from kvell.prefix.tokens import Tokens
from tests.oracle.core.growth import Growth
from tests.oracle.core.lending import send_away
from tests.oracle.core.looking import (
    Counters,
    empty_large_of,
    large_pages_of,
    small_pages_of,
    snapshot_of,
    totals_of,
)
from tests.oracle.core.lookup import known, match, reach, resume, resume_embeddings
from tests.oracle.core.publishing import Publisher
from tests.oracle.core.receiving import Receiver
from tests.oracle.core.reserving import adopt, delete, reserve
from tests.oracle.eviction.checkpoints import cuts, waypoint_tokens
from tests.oracle.eviction.evictor import COARSE, EvictionRule, LeastRecentlyUsed
from tests.oracle.placement.compaction import Compactor
from tests.oracle.placement.holders import Checkpoint, GroupPages, Holder
from tests.oracle.placement.store import Store
from tests.oracle.placement.withholding import Withholder


def keep_states(store: Store, holder: Holder, group: int, until: int) -> list[tuple[int, ...]]:
    """Reserve pages for the states worth keeping, the most valuable first.

    :returns: rows of group, tokens before the state, part of the state, page.
    """
    own = [store.groups[index] for index in holder.own]
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
    spec = store.groups[group]
    ranked = [(store.usefulness.rank(sort), cut, sort) for cut, sort in positions]
    for full_rank, cut, sort in sorted(ranked, reverse=True):
        worth = is_worth_displacing(spec, own, cut - holder.hit_tokens)
        rank = full_rank if worth else min(full_rank, COARSE)
        limit = store.rule.limit(rank, store.step)
        pages = store.placer.keep(group, spec.slices, rank, limit)
        if pages is not None:
            holder.checkpoints.append(Checkpoint(group, cut, sort, rank, tuple(pages)))
            rows.extend((group, cut, part, page) for part, page in enumerate(pages))
    return rows


class ReferenceCore:
    """A :class:`kvell.prefix.interface.VisibleCore` in plain Python."""

    def __init__(self, layout: Layout, rule: EvictionRule | None = None) -> None:
        self.store = Store(layout, rule or LeastRecentlyUsed())
        self._publisher = Publisher(self.store)
        self._receiver = Receiver(self.store, self._publisher)
        self._growth = Growth(self.store)
        self._compactor = Compactor(self.store)
        self._withholder = Withholder(self.store)
        self._holders: dict[int, Holder] = {}
        self._next_handle = 1
        self._hit_tokens = 0
        self._group_hit_tokens = [0] * len(layout.groups)

    @property
    def layout(self) -> Layout:
        return self.store.layout

    def register(self, groups: Sequence[GroupSpec]) -> None:
        self.store.register(groups)
        self._group_hit_tokens.extend([0] * len(groups))
        self._publisher.checkpoint_pages.extend([0] * len(groups))
        for holder in self._holders.values():
            holder.groups.extend(GroupPages(0, []) for _ in groups)

    def begin_step(self, step: int) -> None:
        if step < self.store.step:
            raise ValueError(f"steps only grow: {step} after {self.store.step}")
        self.store.evictor.now = step
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
        facts = facts_of(len(tokens), prompt_tokens, images)
        return match(self.store, tokens, _root(model, root), facts, self.store.own(model))[0]

    def known(self, tokens: Tokens, root: str, *, model: str = "") -> Ints:
        rows = known(self.store, tokens, _root(model, root), self.store.own(model))
        return _rows(rows, 4)

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
        facts, own = facts_of(len(tokens), prompt_tokens, images), self.store.own(model)
        root = _root(model, root)
        prompt = np.array(tokens, np.int32)  # a copy: the caller may reuse its buffer
        if not reuse:
            self.store.placer.evict_unused()
        length, matched, cached = match(self.store, prompt, root, facts, own)
        length = length if reuse else 0
        path = [node for node, _ in self.store.tree.walk(root, prompt[:length])]
        node = path[-1] if path else self.store.tree.root(root)
        groups = [GroupPages(0, []) for _ in self.store.groups]
        for index in own:
            if self.store.groups[index].kind is GroupKind.VISION:
                groups[index] = resume_embeddings(self.store, index, prompt, root, facts, length)
            else:
                groups[index] = resume(self.store, index, facts, length, cached[index])
        handle = self._next_handle
        self._next_handle += 1
        self.store.tree.hold(node)
        self.store.pool.open_holder(handle)
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
            renewed_step=self.store.step,
        )
        return handle

    def claim(self, handle: int, expected_tokens: int, *, will_return: bool | None = None) -> None:
        holder = self._holders[handle]
        if holder.is_reservation:
            raise ValueError(f"handle {handle} has no text to compute")
        holder.will_return = will_return
        holder.lease_until = None
        holder.is_claimed = True
        holder.expected_tokens = expected_tokens
        self._hit_tokens += holder.hit_tokens
        self.store.placer.hits.note(holder.hit_tokens, len(holder.tokens))
        self._publisher.note_used(holder)
        for index, held in holder.own_groups():
            group = self.store.groups[index]
            if group.kind.counts_tokens and group.required_for_hit:
                taken = holder.hit_tokens - held.first * group.page_tokens
                self._group_hit_tokens[index] += max(0, taken)

    def hit_tokens(self, handle: int) -> int:
        return self._holders[handle].hit_tokens

    def receive(self, handle: int, computed: int) -> None:
        holder = self._holders[handle]
        most = holder.num_tokens - (holder.lease_until is None)
        if not holder.hit_tokens <= computed <= most:
            raise ValueError(f"{computed} tokens cannot follow {holder.hit_tokens}")
        if holder.is_reservation or self._receiver.cannot(holder, computed):
            raise ValueError(f"handle {handle} cannot receive what it computes")
        self._receiver.receive(holder, computed)

    def sources(self, handle: int) -> Ints:
        rows = [
            (group, position, page, place[0])
            for group, held in self._holders[handle].own_groups()
            for position, (place, page) in sorted(held.sources.items())
        ]
        return _rows(rows, 4)

    def reserve(self, counts: Ints, lease_until: int, *, model: str = "") -> int:
        reserved = reserve(self.store, self._next_handle, counts.tolist(), model, lease_until)
        if reserved is None:
            return 0
        self._holders[self._next_handle] = reserved
        self._next_handle += 1
        return reserved.handle

    def adopt(
        self, handle: int, tokens: Tokens, root: str, *, prompt_tokens: int | None = None
    ) -> None:
        adopt(self.store, self._holders[handle], tokens, root, prompt_tokens)

    def delete(self, tokens: Tokens, root: str, *, model: str = "") -> int:
        self.store.own(model)
        return delete(self.store, tokens, _root(model, root))

    def grow(self, handles: Ints, until: Ints) -> tuple[int, Ints]:
        served, rows = self._growth.grow(self._asked(handles, until))
        return served, _rows(rows, 4)

    def _asked(self, handles: Ints, until: Ints) -> list[tuple[Holder, int]]:
        return [
            (self._holders[int(handle)], int(end))
            for handle, end in zip(handles, until, strict=True)
        ]

    def copies(self) -> Ints:
        rows, self._growth.copies = self._growth.copies, []
        return _rows(rows, 4)

    def largest(self, handle: int, until: int) -> int:
        holder = self._holders[handle]
        if holder.computed < holder.facts.prompt_tokens and self._publisher.drops(holder):
            until = min(until, holder.facts.prompt_tokens)
        return self._growth.largest(holder, until)

    def fits(
        self, handle: int, until: int, chunk_tokens: int, others: Ints, others_until: Ints
    ) -> bool:
        requests = self._asked(others, others_until)
        return self._growth.fits(self._holders[handle], until, chunk_tokens, requests)

    def may_fit(self) -> bool:
        """Return True: this core remembers no rejection."""
        return True

    def held_pages(self, handle: int) -> Ints:
        rows = [
            (0, group, held.first + i, page)
            for group, held in enumerate(self._holders[handle].groups)
            for i, page in enumerate(held.pages)
        ]
        return _rows(rows, 4)

    def checkpoint(self, handles: Ints, until: Ints) -> Ints:
        rows: list[tuple[int, ...]] = []
        for index, (handle, end) in enumerate(zip(handles, until, strict=True)):
            holder = self._holders[int(handle)]
            for group in holder.own:
                if self.store.groups[group].kind is GroupKind.STATE and self._publisher.publishes(
                    holder
                ):
                    kept = keep_states(self.store, holder, group, int(end))
                    rows.extend((index, *row) for row in kept)
        return _rows(rows, 5)

    def compact(self, most_large: int) -> Ints:
        rows: list[tuple[int, ...]] = []
        holders = list(self._holders.values())
        for holder, group, position, old, new in self._compactor.compact(holders, most_large):
            rows.append((holder.handle, group, position, new))
            self._growth.copies.append((holder.handle, group, old, new))
        return _rows(rows, 4)

    def append(self, handles: Ints, tokens: Ints) -> None:
        for handle, token in zip(handles, tokens, strict=True):
            self._holders[int(handle)].generated.append(int(token))

    def advance(self, handles: Ints, computed: Ints) -> None:
        for handle, length in zip(handles, computed, strict=True):
            holder = self._holders[int(handle)]
            self._publisher.advance(holder, int(length))

    def close(self, handle: int, *, renew: bool = True, returns: bool = False) -> None:
        holder = self._holders.pop(handle)
        self._publisher.give_back(holder, renew=renew, returns=returns)
        self.store.pool.close_holder(handle)
        self.store.tree.let_go(holder.node)
        # Reuse the handle of a rejected request: plans must not depend on the number of rejections.
        if handle == self._next_handle - 1 and not holder.is_claimed and holder.lease_until is None:
            self._next_handle -= 1

    def send_away(self, handle: int, away_tokens: int) -> None:
        send_away(self.store, self._publisher, self._holders[handle], away_tokens)

    def reclaim_order(self) -> LongInts:
        return self._withholder.reclaim_order()

    def withhold(self, larges: Ints) -> None:
        self._withholder.withhold(larges)

    def restore(self, larges: Ints) -> None:
        self._withholder.restore(larges)

    def watch_index(self) -> None:
        self.store.changes.watch()

    def index_changes(self) -> Ints:
        return _rows(self.store.changes.taken(), 5)

    def empty_large_pages(self) -> int:
        return empty_large_of(self.store)

    def evicted_pages(self) -> tuple[int, ...]:
        return tuple(self.store.placer.evicted_pages)

    def totals(self) -> PoolTotals:
        counted = Counters(
            self._hit_tokens, self._group_hit_tokens, self._publisher.checkpoint_pages
        )
        return totals_of(self.store, counted)

    def snapshot(self) -> PoolSnapshot:
        return snapshot_of(self.store, self._holders.values(), self._hit_tokens)

    def large_pages(self) -> LongInts:
        return large_pages_of(self.store)

    def small_pages(self, large: int) -> LongInts:
        return small_pages_of(self.store, large)

    def reach(
        self,
        tokens: Tokens,
        root: str,
        *,
        images: Images | None = None,
        prompt_tokens: int | None = None,
        model: str = "",
    ) -> LongInts:
        facts, own = facts_of(len(tokens), prompt_tokens, images), self.store.own(model)
        lengths = reach(self.store, tokens, _root(model, root), facts, own)
        groups = range(len(self.store.groups))
        return np.asarray([lengths.get(index, NO_REACH) for index in groups], np.int64)


def _root(model: str, root: str) -> str:
    return f"{model}/{root}"


def _rows(rows: Sequence[tuple[int, ...]], columns: int) -> Ints:
    return np.asarray(rows, np.int32).reshape(-1, columns)
