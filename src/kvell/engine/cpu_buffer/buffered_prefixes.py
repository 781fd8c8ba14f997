"""Cached prefixes in the CPU buffer: a second tier behind the pool's own cache.

::

    request ends ──► its pages are cached in the pool, the request is remembered here
                        │ memory runs short: pages are copied out, those of requests that
                        ▼ ended longest ago first, before they are evicted
                     in the buffer, page by page (:mod:`kvell.engine.cpu_buffer.prefix_pages`)
                        │ a request hits a longer prefix here than in the pool,
                        ▼ and copying is quicker than computing
                     copied in with the plan that admits it, and cached in the pool again

Prefixes give way to preempted requests.  Pages are copied, not moved: they stay here when they
are fetched, and stay in the pool when they are copied out.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvell.cost.swap_rule import WAYS, SwapRule
from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.cpu_buffer.prefix_digests import PrefixDigests
from kvell.engine.cpu_buffer.prefix_pages import Key, PrefixPages
from kvell.engine.requests.plan import NewPages
from kvell.engine.requests.request import Request
from kvell.memory import GroupKind, MemoryCore
from kvell.vocabulary import MIB, RequestId

SERVED_KINDS = frozenset({GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED})
"""States are left out: a request does not hold the cached state itself, but a copy of it."""
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
    prompt_tokens: int


@dataclass(frozen=True)
class _Found:
    """The prefix of a request that is in the buffer: its first ``computed`` tokens."""

    digests: PrefixDigests
    computed: int


class BufferedPrefixes:
    """The cached prefixes in the buffer; pure, used by :class:`.swapping.Swapping`.

    :ivar hit_tokens: tokens that requests have hit here and not in the pool, so far.
    """

    def __init__(self, core: MemoryCore, buffer: PageBuffer, rule: SwapRule) -> None:
        self.rungs = dict.fromkeys(("cache_out", "cache_in"), 0)
        self.hit_tokens = 0
        self.pages = PrefixPages(core.layout.groups, buffer)
        self._core, self._rule = core, rule
        self._groups = core.layout.groups
        self._ended: deque[_Ended] = deque(maxlen=MOST_REMEMBERED)
        self._coming: tuple[RequestId, _Found] | None = None  # for the request opened last
        self._asked: tuple[RequestId, int, int] | None = None
        self._found: _Found | None = None
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
        prompt_tokens = len(request.prompt)
        self._ended.append(_Ended(tokens, request.cache_root, request.model, prompt_tokens))

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
        length, held = self._cached(ended)
        digests = PrefixDigests(ended.tokens, _root(ended.model, ended.root))
        cached = [
            (self.pages.key(group, position, digests), page)
            for group, position, page in sorted(held.tolist(), key=self._begin_of)
        ]
        all_bytes = sum(self._groups[key[0]].page_stride_bytes for key, _ in cached)
        if not length or not self._rule.swaps(length, all_bytes):
            return all_bytes, 0
        taken = list(self._taken(cached, most_bytes))
        self.pages.touch(key for key, _ in reversed(cached))
        rows.extend(taken)
        new_bytes = sum(self._groups[group].page_stride_bytes for group, _, _ in taken)
        self._copied_bytes += new_bytes
        return all_bytes, new_bytes

    def _cached(self, ended: _Ended) -> tuple[int, NewPages]:
        """Length of its prefix in the pool, which ends at page ends of all groups; and the pages
        [m, 3]: group, position, page."""
        step, most = self.pages.step(self._own(ended.model)), len(ended.tokens) - 1
        while most > 0:
            most -= most % step
            tokens = ended.tokens[: most + 1]
            prompt_tokens = min(ended.prompt_tokens, len(tokens))
            handle = self._core.open(
                tokens, ended.root, prompt_tokens=prompt_tokens, model=ended.model
            )
            most, held = self._core.hit_tokens(handle), self._core.held_pages(handle)[:, 1:]
            self._core.close(handle, renew=False)
            if not most % step:
                return most, held
        return 0, _rows([])

    def _begin_of(self, row: tuple[int, int, int]) -> int:
        """Position of a page's first token."""
        group, position, _ = row
        return position * self._groups[group].page_tokens

    def _taken(
        self, cached: Sequence[tuple[Key, int]], most_bytes: int
    ) -> Iterator[tuple[int, int, int]]:
        """Take pages of the buffer for those not in it yet, while there are any."""
        for key, page in cached:
            if key in self.pages:
                continue
            held = self.pages.put(key) if most_bytes > 0 else None
            if held is None:
                return
            most_bytes -= self._groups[key[0]].page_stride_bytes
            self.rungs["cache_out"] += 1
            yield key[0], page, held

    # ---------------------------------------------------------------------------- in

    def resume(self, request: Request) -> None:
        """Resume an opened request after its prefix here, if that is longer than its hit and
        quicker to copy than to compute.  A request that runs alone starts from nothing."""
        self._coming = None
        if not len(self.pages) or request.runs_alone or not self._serves(request):
            return
        own, hit = self._own(request.model), request.computed
        found = self._found_for(request, own)
        if found.computed <= hit:
            return
        size_bytes = sum(
            self._groups[group].page_stride_bytes
            for group, position in self.pages.needed(own, found.computed)
            if (position + 1) * self._groups[group].page_tokens > hit
        )
        if self._rule.swaps(found.computed - hit, size_bytes // WAYS):
            self._core.receive(request.handle, found.computed)
            request.computed = found.computed
            self._coming = request.request_id, found

    def copy_in(self, request: Request, before: NewPages) -> NewPages:
        """Pages to fetch for a request that now runs [m, 3]: group, page of the buffer, page.

        :param before: rows that it held when it was opened; these are not fetched.
        """
        coming, self._coming = self._coming, None
        if coming is None or coming[0] != request.request_id:
            return _rows([])
        _, found = coming
        known = set(map(tuple, before[:, 1:3].tolist()))
        rows: Moves = []
        keys: list[Key] = []
        for _, group, position, page in self._core.held_pages(request.handle).tolist():
            is_later = position * self._groups[group].page_tokens >= found.computed
            if is_later or (group, position) in known:
                continue
            key = self.pages.key(group, position, found.digests)
            keys.append(key)
            rows.append((group, self.pages.page(key), page))
        self.pages.touch(reversed(keys))
        self.rungs["cache_in"] += 1
        self.hit_tokens += found.computed - self._core.hit_tokens(request.handle)
        return _rows(rows)

    def _found_for(self, request: Request, own: Sequence[int]) -> _Found:
        """Look up the request's prefix; the answer is kept until pages come or go."""
        asked = (request.request_id, request.num_tokens, self.pages.version)
        if self._found is None or self._asked != asked:
            tokens = request.tokens(0, request.num_tokens)
            digests = PrefixDigests(tokens, _root(request.model, request.cache_root))
            self._asked, self._found = asked, _Found(digests, self.pages.longest(digests, own))
        return self._found

    # ----------------------------------------------------------------------- internal

    def _own(self, model: str) -> list[int]:
        return [index for index, group in enumerate(self._groups) if group.model == model]

    def _serves(self, request: Request) -> bool:
        """Whether pages hold all of the request's KV, and none is a draft model's or an image's."""
        groups = (self._groups[index] for index in self._own(request.model))
        is_plain = all(group.kind in SERVED_KINDS and not group.is_draft for group in groups)
        return is_plain and not request.image_rows


def _root(model: str, root: str) -> str:
    return f"{len(model)}:{model}{root}"


def _rows(rows: Moves) -> NewPages:
    return np.asarray(rows, np.int32).reshape(-1, 3)
