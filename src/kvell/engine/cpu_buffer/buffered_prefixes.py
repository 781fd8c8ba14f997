"""Cached prefixes in the CPU buffer: a second tier behind the pool's own cache.

::

    request ends ──► its pages are cached in the pool, the request is remembered here
                        │ memory runs short: pages are copied out, those of requests that
                        ▼ ended longest ago first, before they are evicted
                     in the buffer, page by page (:mod:`kvell.mempool.tiers.buffered`)
                        │ a request hits a longer prefix in both tiers together than in the
                        ▼ pool alone, and copying is quicker than computing
                     copied in with the plan that admits it, and cached in the pool again

Prefixes give way to preempted requests.  Pages are copied, not moved: they stay here when they
are fetched, and stay in the pool when they are copied out.  Which tier has a page does not matter
to a hit (:mod:`kvell.mempool.tiers.lookup`); only what the pool lacks is fetched.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvell.cost.swap_rule import SwapRule
from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.requests.plan import NewPages
from kvell.engine.requests.request import Request
from kvell.memory import GroupKind, MemoryCore
from kvell.mempool.tiers.buffered import BufferedPages, Key, Place
from kvell.mempool.tiers.digests import PrefixDigests
from kvell.mempool.tiers.lookup import SERVED_KINDS, Tiers
from kvell.vocabulary import MIB, RequestId

MOST_REMEMBERED = 256
"""Most ended requests to remember."""
AHEAD_SHARE = 8
"""One large page in 8 is kept empty, or cached and copied out: a step may evict it."""
MOST_BYTES = 32 * MIB
"""Most bytes copied out by one plan; several plans copy a larger prefix."""

Moves = list[tuple[int, int, int]]


@dataclass(frozen=True)
class _Ended:
    """Tokens that a request left in the cache: int32 [n]."""

    tokens: NewPages
    root: str
    model: str


@dataclass(frozen=True)
class _Coming:
    """An opened request that goes on behind ``computed`` tokens, and its hit in the pool alone."""

    request_id: RequestId
    tiers: Tiers
    hit: int
    computed: int


class BufferedPrefixes:
    """The cached prefixes in the buffer; pure, used by :class:`.swapping.Swapping`.

    :ivar hit_tokens: tokens that requests have hit and whose pages came from here, so far.
    """

    def __init__(self, core: MemoryCore, buffer: PageBuffer, rule: SwapRule) -> None:
        self.rungs = dict.fromkeys(("cache_out", "cache_in"), 0)
        self.hit_tokens = 0
        self.pages = BufferedPages(core.layout.groups, buffer)
        self._core, self._rule = core, rule
        self._groups = core.layout.groups
        self._ended: deque[_Ended] = deque(maxlen=MOST_REMEMBERED)
        self._coming: _Coming | None = None  # for the request opened last
        self._digests: tuple[RequestId, PrefixDigests] | None = None
        self._copied_bytes = self._evicted_bytes = 0

    def begin(self) -> None:
        """Begin a plan."""
        self.pages.begin()
        self._coming = None

    def let_go(self) -> None:
        """Drop all pages and forget all ended requests."""
        self._ended.clear()
        self.pages.clear()

    # --------------------------------------------------------------------------- out

    def ended(self, request: Request) -> None:
        """Remember an ended request that is about to leave its pages in the cache."""
        if not request.settled or not self._serves(request):
            return
        tokens = request.tokens(0, min(request.num_tokens, request.settled + 1)).copy()
        self._ended.append(_Ended(tokens, request.cache_root, request.model))

    def copy_out(self, wanted_large: int) -> NewPages:
        """Pages to copy out before a plan may evict them [m, 3]: group, page, page of the buffer.

        :param wanted_large: large pages that the plan is about to ask for.
        """
        if not self._ended:
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
        while short_bytes > 0 and left_bytes > 0 and self._ended:
            ended = self._ended.popleft()
            prefix_bytes, new_bytes = self._copy_prefix(ended, left_bytes, rows)
            short_bytes, left_bytes = short_bytes - prefix_bytes, left_bytes - new_bytes
            if left_bytes <= 0:
                self._ended.appendleft(ended)  # some of its pages may be left
        return _rows(rows)

    def _ahead_bytes(self, evicted_pages: Sequence[int]) -> int:
        """Bytes copied out and not evicted yet, assuming that all evicted pages were copied out."""
        pairs = zip(evicted_pages, self._groups, strict=True)
        evicted_bytes = sum(count * group.page_stride_bytes for count, group in pairs)
        gone_bytes, self._evicted_bytes = evicted_bytes - self._evicted_bytes, evicted_bytes
        self._copied_bytes = max(0, self._copied_bytes - gone_bytes)
        return self._copied_bytes

    def _copy_prefix(self, ended: _Ended, most_bytes: int, rows: Moves) -> tuple[int, int]:
        """Add the pages of an ended request that are still cached, first ones first, to ``rows``.

        Returns the bytes of all of them, and of those that were not in the buffer yet.
        """
        digests = PrefixDigests(ended.tokens, _root(ended.model, ended.root))
        tiers = self._look_up(digests, ended.tokens, ended.root, ended.model)
        length = tiers.longest
        places = sorted(tiers.places(length), key=self._begin_of)
        cached = [
            (group, place, page)
            for group, _, place in places
            if (page := tiers.pool_page(group, place)) is not None
        ]
        all_bytes = sum(self._groups[group].page_stride_bytes for group, _, _ in cached)
        if not length or not self._rule.swaps(length, all_bytes):
            return all_bytes, 0
        taken = list(self._taken(cached, digests, tiers, most_bytes))
        self.pages.touch(tiers.key(group, place) for group, _, place in reversed(places))
        rows.extend(taken)
        new_bytes = sum(self._groups[group].page_stride_bytes for group, _, _ in taken)
        self._copied_bytes += new_bytes
        return all_bytes, new_bytes

    def _begin_of(self, needed: tuple[int, int, Place]) -> int:
        """Position of a page's first token; a state, which all others are in vain without, is
        first."""
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
        """Take pages of the buffer for those not in it yet, while there are any."""
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
        """Resume an opened request after the prefix that both tiers have together, as far as it is
        quicker to copy than to compute.  A request that runs alone starts from nothing."""
        self._coming = None
        if not len(self.pages) or request.runs_alone or not self._serves(request):
            return
        hit, tokens = request.computed, request.tokens(0, request.num_tokens)
        tiers = self._look_up(
            self._digests_of(request, tokens), tokens, request.cache_root, request.model
        )
        computed = tiers.best(hit, self._rule)
        if computed > hit:
            self._core.receive(request.handle, computed)
            request.computed = computed
            self._coming = _Coming(request.request_id, tiers, hit, computed)

    def copy_in(self, request: Request, before: NewPages) -> NewPages:
        """Pages to fetch for a request that now runs [m, 3]: group, page of the buffer, page.

        :param before: rows that it held when it was opened; these are not fetched.
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
        """Tokens behind the hit of which some page came from here; a state is of all of them."""
        came = np.zeros(computed, bool)
        for group, (end, _) in fetched:
            spec = self._groups[group]
            is_state = spec.kind is GroupKind.STATE
            came[0 if is_state else (end - 1) // spec.page_tokens * spec.page_tokens : end] = True
        return int(came[hit:].sum())

    def _look_up(self, digests: PrefixDigests, tokens: NewPages, root: str, model: str) -> Tiers:
        known = self._core.known(tokens, root, model=model)
        return Tiers(self.pages, self._own(model), digests, known)

    def _digests_of(self, request: Request, tokens: NewPages) -> PrefixDigests:
        """Of a request's tokens; kept, since one that waits asks at every step."""
        found = self._digests
        if found is None or found[0] != request.request_id or len(found[1]) != len(tokens):
            digests = PrefixDigests(tokens, _root(request.model, request.cache_root))
            self._digests = found = request.request_id, digests
        return found[1]

    # ----------------------------------------------------------------------- internal

    def _own(self, model: str) -> list[int]:
        return [index for index, group in enumerate(self._groups) if group.model == model]

    def _serves(self, request: Request) -> bool:
        """Whether pages hold all of the request's KV, and none is a draft model's or an image's."""
        groups = (self._groups[index] for index in self._own(request.model))
        is_plain = all(group.kind in SERVED_KINDS and not group.is_draft for group in groups)
        return is_plain and not request.image_rows


def held_already(core: MemoryCore, handle: int, before: NewPages) -> set[tuple[int, int]]:
    """(group, position) of what need not be fetched: held before, or copied within the pool.

    :param before: rows of pages that the holder had when it was opened.
    """
    sources = core.sources(handle)[:, :2].tolist()
    return set(map(tuple, [*before[:, 1:3].tolist(), *sources]))


def _root(model: str, root: str) -> str:
    return f"{len(model)}:{model}{root}"


def _rows(rows: Moves) -> NewPages:
    return np.asarray(rows, np.int32).reshape(-1, 3)
