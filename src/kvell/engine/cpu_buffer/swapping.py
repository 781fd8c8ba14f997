"""Preempted requests in the CPU buffer, whose pages are copied out and back.

::

    RUNNING ──preempted──► the rule, the buffer ──no──► recomputed, as far as it is not cached
                                 │ yes
                                 ▼                                    cancel, finish
                       SWAPPED: pages out in that plan ───────────────────────────────► gone
                                 │ admitted: open, receive, grow
                                 ▼
                       RUNNING: pages in with the plan that computes its next token

A plan copies pages out before it does anything else, and in before it copies or computes anything
on the device.  Pages that are cached on the device when the request resumes are not fetched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvell.cost.swap_rule import SwapRule
from kvell.elastic.page_buffer import PageBuffer, first_pages
from kvell.engine.cpu_buffer.buffered_prefixes import BufferedPrefixes, held_already
from kvell.engine.requests.plan import NewPages
from kvell.engine.requests.request import Request
from kvell.memory import IMAGE_KINDS, GroupKind, GroupSpec, MemoryCore
from kvell.mempool.tiers.buffered import BufferedPages
from kvell.mempool.tiers.lookup import SERVED_KINDS
from kvell.pages.rows import NewPageRow, OffloadRow, PageRow
from kvell.vocabulary import PageId, RequestId


@dataclass(frozen=True)
class SavedPages:
    """A request's pages in the buffer.

    :param computed: tokens whose KV or state they hold.
    :param repeats: accepted draft tokens to compute again (see :class:`Request`).
    :param pages: (group, position) → page of the buffer.
    """

    holder: int
    computed: int
    repeats: int
    pages: dict[tuple[int, int], PageId]


class Swapping:
    """The requests in the buffer; used by the scheduler, and pure like it.

    :param prefixes: cached prefixes in the rest of the buffer; None: requests only.
    """

    def __init__(
        self,
        core: MemoryCore,
        buffer: PageBuffer,
        rule: SwapRule,
        prefixes: BufferedPrefixes | None = None,
    ) -> None:
        self.rungs = dict.fromkeys(("swap_out", "swap_in", "recompute", "buffer_full"), 0)
        self.buffer, self.prefixes = buffer, prefixes
        self._core, self.rule = core, rule
        self._saved: dict[RequestId, SavedPages] = {}
        self._computing: dict[RequestId, SavedPages] = {}
        self._next_holder = 1

    @property
    def cached_pages(self) -> BufferedPages | None:
        """The pages of cached prefixes; None if there are requests only."""
        return None if self.prefixes is None else self.prefixes.pages

    def begin(self) -> None:
        """Begin to plan a step; buffer pages that the previous step fetched become free."""
        self.buffer.settle()
        if self.prefixes is not None:
            self.prefixes.begin()

    def has(self, request: Request) -> bool:
        return request.request_id in self._saved

    def saved(self, request: Request) -> SavedPages:
        return self._saved[request.request_id]

    def decodes(self, request: Request) -> bool:
        saved = self.saved(request)
        is_computed = saved.computed + 1 + saved.repeats == request.num_tokens
        return is_computed and bool(request.output)

    def send(self, request: Request, first_large: int) -> dict[tuple[int, int], PageId]:
        """Return (group, position) → page of a request that another instance reads in the buffer,
        counted from the pool's first page.

        :param first_large: number of the buffer's first large page, counted in the same way.
        """
        first_page = first_pages(self._core.layout.groups, first_large)
        pages = self.saved(request).pages
        self.buffer.counts.sent_pages += len(pages)
        return {place: PageId(first_page[place[0]] + page) for place, page in pages.items()}

    def size_bytes(self, request: Request) -> int:
        """Return the bytes that a request would take in the buffer; 0 if it cannot be swapped."""
        return self.buffer.size_bytes(self._need(self._worth_keeping(request)))

    def can_take(self, requests: Sequence[Request]) -> bool:
        """Evict prefixes as needed; return whether the buffer can take all requests."""
        rows = np.concatenate([self._worth_keeping(request) for request in requests])
        return self.fits_all(self._need(rows))

    def _need(self, rows: NewPages) -> list[int]:
        """Return the number of pages of each group."""
        count = len(self._core.layout.groups)
        need: list[int] = np.bincount(rows[:, NewPageRow.GROUP], minlength=count).tolist()
        return need

    def save(self, request: Request, *, asks: bool = True) -> NewPages:
        """Save a request that is about to lose its pages.

        :param asks: whether to ask the rule; False: copy even if recomputing is quicker.
        :returns: the pages to copy out [m, :class:`.OffloadRow`].  Empty if recomputing is quicker
            or the buffer is full.
        """
        rows = self._worth_keeping(request)
        need = self._need(rows)
        pays = not asks or self.rule.swaps(request.computed, self.buffer.size_bytes(need))
        if not pays or not len(rows):
            self.rungs["recompute"] += 1
            return _no_rows()
        self._make_room(need)
        pages = self.buffer.hold(self._next_holder, need)
        if pages is None:
            self.rungs["buffer_full"] += 1
            return _no_rows()
        taken = [iter(some) for some in pages]
        out = np.array([(g, page, next(taken[g])) for _, g, _, page in rows.tolist()], np.int32)
        places = map(tuple, rows[:, [NewPageRow.GROUP, NewPageRow.POSITION]].tolist())
        self._saved[request.request_id] = SavedPages(
            self._next_holder,
            request.computed,
            request.repeats,
            dict(zip(places, out[:, OffloadRow.HELD].tolist(), strict=True)),
        )
        self._next_holder += 1
        self._count("out", out)
        self.rungs["swap_out"] += 1
        return out

    def fits_all(self, need: Sequence[int]) -> bool:
        """Evict prefixes as needed; return whether ``need`` pages of each group are free."""
        self._make_room(need)
        return self.buffer.has_room(need)

    def take(self, request: Request, need: Sequence[int]) -> list[list[PageId]]:
        """Take pages of each group into which a request's prompt is computed.

        :raises ValueError: if they are not free.
        """
        pages = self.buffer.hold(self._next_holder, need)
        if pages is None:
            raise ValueError("the buffer has no room for a prompt")
        places = {
            (group, position): page
            for group, some in enumerate(pages)
            for position, page in enumerate(some)
        }
        self._computing[request.request_id] = SavedPages(
            self._next_holder, len(request.prompt), 0, places
        )
        self._next_holder += 1
        return pages

    def keep_computed(self, request: Request) -> None:
        self._saved[request.request_id] = self._computing.pop(request.request_id)

    def _make_room(self, need: Sequence[int]) -> None:
        if self.prefixes is not None:
            self.prefixes.pages.make_room(need)

    def _worth_keeping(self, request: Request) -> NewPages:
        """Return the pages to save [m, :class:`.NewPageRow`]; none if it cannot be swapped."""
        if not self._can_swap(request):
            return np.empty((0, 4), np.int32)
        rows = self._core.held_pages(request.handle)
        groups = self._core.layout.groups
        sizes = np.asarray([g.page_tokens if g.kind.counts_tokens else 0 for g in groups])
        swappable = np.asarray([g.kind in SERVED_KINDS for g in groups])
        of_group = rows[:, NewPageRow.GROUP]
        is_computed = rows[:, NewPageRow.POSITION] * sizes[of_group] < request.computed
        kept: NewPages = rows[is_computed & swappable[of_group]]
        return kept

    def _can_swap(self, request: Request) -> bool:
        """Return whether a request has computed more than it hit, all in swappable pages.

        A borrowing request is not swapped, since it would lose its remote sections anyway.
        """
        kinds = {g.kind for g in self._core.layout.groups if g.model == request.model}
        if not kinds <= SERVED_KINDS | _empty_kinds(request) or request.remote_tokens:
            return False
        return request.computed > self._core.hit_tokens(request.handle)

    def resume(self, request: Request) -> None:
        """Resume a reopened request where it was, if that is beyond its hit.

        Its pages are not on the device yet: :meth:`fetch` returns their sources.
        """
        saved = self._saved.get(request.request_id)
        if saved is None and self.prefixes is not None:
            self.prefixes.resume(request)
        if saved is None or saved.computed <= request.computed:
            return
        self._core.receive(request.handle, saved.computed)
        request.computed, request.repeats = saved.computed, saved.repeats

    def fetch(self, request: Request, before: NewPages) -> NewPages:
        """Return a request's pages to fetch [m, :class:`.FetchRow`]."""
        saved = self._saved.pop(request.request_id, None)
        if saved is None:
            copied = _no_rows()
            if self.prefixes is not None:
                copied = self.prefixes.copy_in(request, before)
                self._count("in", copied)
            return copied
        self.buffer.release(saved.holder)
        if saved.computed <= self._core.hit_tokens(request.handle):
            return _no_rows()
        held = held_already(self._core, request.handle, before)
        rows = [
            (group, saved.pages[group, position], page)
            for _, group, position, page in self._core.held_pages(request.handle).tolist()
            if (group, position) not in held and self._is_computed(group, position, saved)
        ]
        fetched = np.asarray(rows, np.int32).reshape(-1, 3)
        self._count("in", fetched)
        self.rungs["swap_in"] += 1
        return fetched

    def _is_computed(self, group: int, position: int, saved: SavedPages) -> bool:
        spec = self._core.layout.groups[group]
        return not spec.kind.counts_tokens or position * spec.page_tokens < saved.computed

    def on_ended(self, request: Request) -> None:
        """Remember an ended request whose pages are about to be cached on the device."""
        if self.prefixes is not None:
            self.prefixes.on_ended(request)

    def copy_out(self, wanted_large: int) -> NewPages:
        """Return pages [m, :class:`.OffloadRow`] to copy out before a plan evicts them."""
        copied = _no_rows()
        if self.prefixes is not None:
            copied = self.prefixes.copy_out(wanted_large)
            self._count("out", copied)
        return copied

    def counters(self) -> dict[str, int]:
        return self.rungs | (self.prefixes.rungs if self.prefixes else {})

    def figures(self) -> dict[str, int]:
        figures = self.buffer.figures() | {"holders": len(self._saved) + len(self._computing)}
        if self.prefixes is None:
            return figures
        cached = {
            "cached_pages": len(self.prefixes.pages),
            "cache_hit_tokens": self.prefixes.hit_tokens,
        }
        return figures | cached

    def drop_prefixes(self) -> None:
        if self.prefixes is not None:
            self.prefixes.let_go()

    def forget(self, request: Request) -> None:
        for pages in (self._saved, self._computing):
            saved = pages.pop(request.request_id, None)
            if saved is not None:
                self.buffer.release(saved.holder)

    def clear(self) -> None:
        self._saved.clear()
        self._computing.clear()
        self.drop_prefixes()
        self.buffer.clear()

    def _count(self, way: str, rows: NewPages) -> None:
        if not len(rows):
            return
        counts, groups = self.buffer.counts, self._core.layout.groups
        size_bytes = moved_bytes(rows, groups)
        if way == "out":
            counts.out_pages += len(rows)
            counts.out_bytes += size_bytes
        else:
            counts.in_pages += len(rows)
            counts.in_bytes += size_bytes


def _empty_kinds(request: Request) -> frozenset[GroupKind]:
    """Return the kinds of groups in which a request needs no pages: those of images, without
    images; those of their embeddings, once all of them are read."""
    ends = [start + tokens for start, tokens, _ in request.spec.images]
    if not ends:
        return IMAGE_KINDS
    return frozenset({GroupKind.VISION} if request.computed >= max(ends) else ())


def moved_bytes(rows: NewPages, groups: Sequence[GroupSpec]) -> int:
    """Return the bytes of a plan's offloads or fetches."""
    counts = np.bincount(rows[:, PageRow.GROUP], minlength=len(groups))
    return int(sum(int(n) * g.page_stride_bytes for n, g in zip(counts, groups, strict=True)))


def _no_rows() -> NewPages:
    return np.empty((0, 3), np.int32)
