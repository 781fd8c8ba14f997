"""Cached prefixes in the CPU buffer: a second tier behind what the pool caches itself.

::

    request ends ──► its pages are cached in the pool, it is remembered here
                        │ memory runs short: copied out, those that ended longest ago first,
                        ▼ before the evictor takes them
                     in the buffer, page by page (:mod:`kvell.engine.cpu_buffer.prefix_pages`)
                        │ a request begins like that, further than the pool knows
                        ▼ and copying is quicker than computing
                     copied in with the plan that admits it, and cached in the pool again

Whoever is preempted goes before prefixes, which give way.  What is copied is a copy: pages stay
here when they are fetched, and stay in the pool when they go out.
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
"""A state that is cached is no page of whoever looks it up, but what its own is copied from."""
MOST_REMEMBERED = 256
"""Requests that ended, at most."""
AHEAD_SHARE = 8
"""One large page in so many is empty, or cached and copied out: what a step may evict."""
MOST_BYTES = 32 * MIB
"""Copied out by one plan; a prefix of more goes out with several."""

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
    """What there is for a request: its first ``computed`` tokens."""

    digests: PrefixDigests
    computed: int


class BufferedPrefixes:
    """What of the cache is in the buffer; pure, asked by :class:`.swapping.Swapping`.

    :ivar hit_tokens: that requests found here and not in the pool, so far.
    """

    def __init__(self, core: MemoryCore, buffer: PageBuffer, rule: SwapRule) -> None:
        self.rungs = dict.fromkeys(("cache_out", "cache_in"), 0)
        self.hit_tokens = 0
        self.pages = PrefixPages(core.layout.groups, buffer)
        self._core, self._rule = core, rule
        self._groups = core.layout.groups
        self._ended: deque[_Ended] = deque(maxlen=MOST_REMEMBERED)
        self._coming: tuple[RequestId, _Found] | None = None  # for who was opened last
        self._asked: tuple[RequestId, int, int] | None = None
        self._found: _Found | None = None
        self._copied_bytes = self._evicted_bytes = 0

    def begin(self) -> None:
        """A plan is made."""
        self.pages.begin()
        self._coming = None

    def let_go(self) -> None:
        """Nothing is kept any more, nor remembered."""
        self._ended.clear()
        self.pages.clear()

    # --------------------------------------------------------------------------- out

    def ended(self, request: Request) -> None:
        """The request is over, and is about to leave its pages in the cache."""
        if not request.settled or not self._serves(request):
            return
        tokens = request.tokens(0, min(request.num_tokens, request.settled + 1)).copy()
        prompt_tokens = len(request.prompt)
        self._ended.append(_Ended(tokens, request.cache_root, request.model, prompt_tokens))

    def copy_out(self, wanted_large: int) -> NewPages:
        """Before a plan takes memory: what it may evict [m, 3], group, page, page of the buffer.

        :param wanted_large: large pages that it is about to ask for.
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
                self._ended.appendleft(ended)  # there may be more of it
        return _rows(rows)

    def _ahead_bytes(self, evicted_pages: Sequence[int]) -> int:
        """Of what was copied out, so much is not evicted yet, if all that was is of it."""
        pairs = zip(evicted_pages, self._groups, strict=True)
        evicted_bytes = sum(count * group.page_stride_bytes for count, group in pairs)
        gone_bytes, self._evicted_bytes = evicted_bytes - self._evicted_bytes, evicted_bytes
        self._copied_bytes = max(0, self._copied_bytes - gone_bytes)
        return self._copied_bytes

    def _copy_prefix(self, ended: _Ended, most_bytes: int, rows: Moves) -> tuple[int, int]:
        """Add what of it is cached still, its beginning first; bytes of all of that, and of what
        was not here yet."""
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
        """How much of it the pool has, up to where pages of all groups end; and its pages there
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
        """Where a page's tokens begin."""
        group, position, _ = row
        return position * self._groups[group].page_tokens

    def _taken(
        self, cached: Sequence[tuple[Key, int]], most_bytes: int
    ) -> Iterator[tuple[int, int, int]]:
        """Pages of the buffer for those that are not here, as far as there are any."""
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
        """The request was opened: it goes on behind what is here, if that is further than its
        hit and quicker than computing.  Who runs alone starts from nothing."""
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
        """The request has its pages and runs [m, 3]: group, page of the buffer, page.

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
        """What there is for it; for whoever waits it is looked up again when pages come or go."""
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
        """Kinds whose pages tell all there is to know; a draft model's would be missed."""
        groups = (self._groups[index] for index in self._own(request.model))
        is_plain = all(group.kind in SERVED_KINDS and not group.is_draft for group in groups)
        return is_plain and not request.image_rows


def _root(model: str, root: str) -> str:
    return f"{len(model)}:{model}{root}"


def _rows(rows: Moves) -> NewPages:
    return np.asarray(rows, np.int32).reshape(-1, 3)
