"""Cached prefixes in the CPU buffer: a second tier below the pool's own cache.

::

    request ends ──► its pages are cached in the pool, the request is remembered here
                        │ memory runs short: pages are copied out, those of requests that
                        ▼ ended longest ago first, before they are evicted
                     in the buffer, page by page (:mod:`kvell.mempool.tiers.buffered`)
                        │ a request hits a longer prefix in both tiers together than in the
                        ▼ pool alone, and copying is quicker than computing
                     copied in with the plan that admits it, and cached in the pool again

Preempted requests evict prefixes.  Pages are copied, not moved: a page stays here when it is
fetched, and stays in the pool when it is copied out.  A hit may use pages of both tiers
(:mod:`kvell.mempool.tiers.lookup`); only pages that the pool lacks are fetched.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvell.cost.swap_rule import SwapRule
from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.requests.cache_roots import is_unique_root
from kvell.engine.requests.plan import NewPages
from kvell.engine.requests.request import Request
from kvell.memory import GroupKind, MemoryCore
from kvell.mempool.tiers.buffered import BufferedPages, Key, Place
from kvell.mempool.tiers.digests import PrefixDigests, full_root
from kvell.mempool.tiers.lookup import Tiers, served_groups
from kvell.vocabulary import MIB, RequestId

MOST_REMEMBERED = 256
"""Largest number of ended requests to remember."""
AHEAD_SHARE = 8
"""One large page in 8 is kept empty, or cached and copied out, so that a step may evict it."""
MOST_BYTES = 32 * MIB
"""Largest number of bytes that one plan copies out; several plans copy a larger prefix."""

Moves = list[tuple[int, int, int]]


@dataclass(frozen=True)
class _Ended:
    """Tokens that a request left in the cache: int32 [n]."""

    tokens: NewPages
    root: str
    model: str


@dataclass(frozen=True)
class _Coming:
    """An opened request that continues after ``computed`` tokens, and its hit in the pool alone."""

    request_id: RequestId
    tiers: Tiers
    hit: int
    computed: int


class BufferedPrefixes:
    """The cached prefixes in the buffer; pure, used by :class:`.swapping.Swapping`.

    :ivar hit_tokens: number of hit tokens whose pages came from the buffer, so far.
    """

    def __init__(self, core: MemoryCore, buffer: PageBuffer, rule: SwapRule) -> None:
        self.rungs = dict.fromkeys(("cache_out", "cache_in"), 0)
        self.hit_tokens = 0
        self.pages = BufferedPages(core.layout.groups, buffer)
        self._core, self.rule = core, rule
        self._groups = core.layout.groups
        self.ended: deque[_Ended] = deque(maxlen=MOST_REMEMBERED)
        self._coming: _Coming | None = None  # for the request opened last
        self._digests: tuple[RequestId, PrefixDigests] | None = None
        self._copied_bytes = self._evicted_bytes = 0

    def begin(self) -> None:
        self.pages.begin()
        self._coming = None

    def let_go(self) -> None:
        self.ended.clear()
        self.pages.clear()

    # --------------------------------------------------------------------------- out

    def on_ended(self, request: Request) -> None:
        """Remember an ended request that is about to leave its pages in the cache."""
        if not request.settled or not self._serves(request):
            return
        if is_unique_root(request.cache_root):
            return  # no other request could fetch them
        tokens = request.tokens(0, min(request.num_tokens, request.settled + 1)).copy()
        self.ended.append(_Ended(tokens, request.cache_root, request.model))

    def copy_out(self, wanted_large: int) -> NewPages:
        """Return pages [m, :class:`.OffloadRow`] to copy out before a plan evicts them."""
        if not self.ended:
            return _rows([])
        layout = self._core.layout
        wanted_large = max(wanted_large, layout.num_large_pages // AHEAD_SHARE)
        short_large = wanted_large - self._core.empty_large_pages()
        if short_large <= 0:
            return _rows([])
        short_bytes = short_large * layout.large_page_bytes
        short_bytes -= self._ahead_bytes(self._core.evicted_pages())
        rows: Moves = []
        left_bytes = MOST_BYTES
        while short_bytes > 0 and left_bytes > 0 and self.ended:
            ended = self.ended.popleft()
            prefix_bytes, new_bytes = self._copy_prefix(ended, left_bytes, rows)
            short_bytes, left_bytes = short_bytes - prefix_bytes, left_bytes - new_bytes
            if left_bytes <= 0:
                self.ended.appendleft(ended)  # some of its pages may be left
        return _rows(rows)

    def _ahead_bytes(self, evicted_pages: Sequence[int]) -> int:
        """Return the bytes copied out and not evicted yet, as if all evicted pages were copied."""
        pairs = zip(evicted_pages, self._groups, strict=True)
        evicted_bytes = sum(count * group.page_stride_bytes for count, group in pairs)
        gone_bytes = evicted_bytes - self._evicted_bytes
        self._evicted_bytes = evicted_bytes
        self._copied_bytes = max(0, self._copied_bytes - gone_bytes)
        return self._copied_bytes

    def _copy_prefix(self, ended: _Ended, most_bytes: int, rows: Moves) -> tuple[int, int]:
        """Add the pages of an ended request that are still cached, first ones first, to ``rows``.

        :returns: the bytes of all of them, and of those that were not in the buffer yet.
        """
        digests = PrefixDigests(ended.tokens, full_root(ended.root, ended.model))
        tiers = self._look_up(digests, ended.tokens, ended.root, ended.model)
        length = tiers.longest
        places = sorted(tiers.places(length), key=self._begin_of)
        cached = [
            (group, place, page)
            for group, _, place in places
            if (page := tiers.pool[group].get(place)) is not None
        ]
        all_bytes = sum(self._groups[group].page_stride_bytes for group, _, _ in cached)
        if not length or not self.rule.swaps(length, all_bytes):
            return all_bytes, 0
        taken = list(self._taken(cached, digests, tiers, most_bytes))
        self.pages.touch(tiers.key(group, place) for group, _, place in reversed(places))
        rows.extend(taken)
        new_bytes = sum(self._groups[group].page_stride_bytes for group, _, _ in taken)
        self._copied_bytes += new_bytes
        return all_bytes, new_bytes

    def _begin_of(self, needed: tuple[int, int, Place]) -> int:
        """Return a page's first token; -1 for a state, without which other pages are useless."""
        group, position, _ = needed
        is_state = self._groups[group].kind is GroupKind.STATE
        return -1 if is_state else position * self._groups[group].page_tokens

    def _taken(
        self,
        cached: Sequence[tuple[int, Place, int]],
        digests: PrefixDigests,
        tiers: Tiers,
        most_bytes: int,
    ) -> Iterator[tuple[int, int, int]]:
        """Allocate buffer pages, while there are any, and yield the copies into them."""
        for group, place, page in cached:
            if tiers.is_buffered(group, place):
                continue
            held = self.pages.put(group, place, digests) if most_bytes > 0 else None
            if held is None:
                return
            most_bytes -= self._groups[group].page_stride_bytes
            self.rungs["cache_out"] += 1
            yield group, page, held

    # ---------------------------------------------------------------------------- in

    def resume(self, request: Request) -> None:
        """Resume an opened request after the prefix in both tiers, as far as copying is quicker
        than computing.

        A request that runs alone starts without a prefix.  One with pages at other instances has a
        root of its own, so that the pool's part of a prefix is not its.
        """
        self._coming = None
        if not len(self.pages) or request.runs_alone or request.remote_tokens:
            return
        if not self._serves(request):
            return
        hit = request.computed
        tokens = request.tokens(0, request.num_tokens)
        tiers = self._look_up(
            self._digests_of(request, tokens), tokens, request.cache_root, request.model
        )
        computed = tiers.best(hit, self.rule)
        if computed > hit:
            self._core.receive(request.handle, computed)
            request.computed = computed
            self._coming = _Coming(request.request_id, tiers, hit, computed)

    def copy_in(self, request: Request, before: NewPages) -> NewPages:
        """Return the pages to fetch for a request that now runs [m, :class:`.FetchRow`].

        :param before: rows that the request held when it was opened; these are not fetched.
        """
        coming, self._coming = self._coming, None
        if coming is None or coming.request_id != request.request_id:
            return _rows([])
        places = {
            (group, position): place
            for group, position, place in coming.tiers.places(coming.computed)
        }
        for group, position in held_already(self._core, request.handle, before):
            places.pop((group, position), None)
        rows: Moves = []
        keys: list[Key] = []
        for _, group, position, page in self._core.held_pages(request.handle).tolist():
            place = places.get((group, position))
            if place is not None:
                keys.append(coming.tiers.key(group, place))
                rows.append((group, self.pages.page(keys[-1]), page))
        self.pages.touch(reversed(keys))
        self.rungs["cache_in"] += 1
        fetched = [(group, places[group, at]) for group, at in places]
        self.hit_tokens += self._tokens_of(fetched, coming.hit, coming.computed)
        return _rows(rows)

    def _tokens_of(self, fetched: Sequence[tuple[int, Place]], hit: int, computed: int) -> int:
        """Return the number of tokens after the hit with a fetched page; a state covers all."""
        came = np.zeros(computed, bool)
        for group, (end, _) in fetched:
            spec = self._groups[group]
            is_state = spec.kind is GroupKind.STATE
            came[0 if is_state else (end - 1) // spec.page_tokens * spec.page_tokens : end] = True
        return int(came[hit:].sum())

    def _look_up(self, digests: PrefixDigests, tokens: NewPages, root: str, model: str) -> Tiers:
        cached = self._core.known(tokens, root, model=model)
        return Tiers(self.pages, served_groups(self._groups, model), digests, cached)

    def _digests_of(self, request: Request, tokens: NewPages) -> PrefixDigests:
        """Return the digests of a request's tokens; a waiting request needs them at every step."""
        latest = self._digests
        if latest is None or latest[0] != request.request_id or len(latest[1]) != len(tokens):
            digests = PrefixDigests(tokens, full_root(request.cache_root, request.model))
            self._digests = latest = request.request_id, digests
        return latest[1]

    # ----------------------------------------------------------------------- internal

    def _serves(self, request: Request) -> bool:
        """Return whether pages hold all of a request's KV, and none is of an image."""
        return bool(served_groups(self._groups, request.model)) and not request.spec.images


def held_already(core: MemoryCore, handle: int, before: NewPages) -> set[tuple[int, int]]:
    """Return (group, position) of pages that need no fetch: held before, or copied in the pool."""
    sources = core.sources(handle)[:, :2].tolist()
    return set(map(tuple, [*before[:, 1:3].tolist(), *sources]))


def _rows(rows: Moves) -> NewPages:
    return np.asarray(rows, np.int32).reshape(-1, 3)
