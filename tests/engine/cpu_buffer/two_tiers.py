"""A machine over pool and buffer that knows what every page of either holds."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.cpu_buffer.buffered_prefixes import BufferedPrefixes
from kvell.engine.requests.request import Request
from kvell.memory import GroupKind, VisibleCore, audit, create_core
from kvell.mempool.tiers.buffered import Place, needed_pages
from kvell.mempool.tiers.digests import PrefixDigests
from kvell.mempool.tiers.lookup import Tiers
from tests.elastic.buffer_audit import audit_pages
from tests.engine.swapping import Always
from tests.engine.works import spec_of
from tests.pages.pools import Chunk, group, pool_of, state

LAYOUTS = {
    "full": [group(4, 2)],
    "full, window": [group(4, 2), group(2, 3, window=7)],
    "full, state": [group(4, 2), state(2, 3)],
    "window, chunk": [group(4, 2, window=9), group(4, 1, window=Chunk(16))],
    "window, state": [group(2, 2, window=6), state(1, 2)],
}

STEMS = [[7 * start + i * i % 5 for i in range(44)] for start in range(3)]

Content = tuple[tuple[int, ...], int, int]


"""What a page holds: the tokens up to its end, its group, its part."""

texts = st.builds(
    lambda stem, count, turn: [*STEMS[stem][:count], *turn],
    st.integers(0, 2),
    st.integers(1, 40),
    st.sampled_from([[], [], [90], [91, 92, 93]]),
)


def ints(*values: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.asarray(values, np.int32)


class TwoTiers(RuleBasedStateMachine):
    """Requests that come, end and come again, while pages go from either tier as chance has it."""

    hits: ClassVar[Counter[str]] = Counter()

    @initialize(
        kind=st.sampled_from(list(LAYOUTS)), large=st.integers(14, 40), held=st.integers(1, 40)
    )
    def start(self, kind: str, large: int, held: int) -> None:
        layout = pool_of(large, *LAYOUTS[kind])
        self.groups = layout.groups
        self.core: VisibleCore = create_core(layout)
        self.buffer = PageBuffer(layout.groups, held)
        self.prefixes = BufferedPrefixes(self.core, self.buffer, Always())
        self.in_pool: dict[tuple[int, int], Content] = {}
        self.in_buffer: dict[tuple[int, int], Content] = {}
        self.running: list[Request] = []
        self.step = self.number = 0

    @rule(text=texts, wanted=st.sampled_from([0, 3, 99]), ends=st.sampled_from([True, True, False]))
    def ask(self, text: list[int], wanted: int, ends: bool) -> None:
        self.next_step(wanted)
        self.number += 1
        request = Request(spec_of(text, request_id=str(self.number)), 0, 1, cache_root="")
        request.handle = self.core.open(request.prompt, "")
        hit = request.computed = self.core.hit_tokens(request.handle)
        found = self.check_known(text)
        self.prefixes.resume(request)
        assert request.computed == max(hit, self.longest(text, found))
        before = self.core.held_pages(request.handle)
        if not self.core.fits(request.handle, len(text), len(text), ints(), ints()):
            self.core.close(request.handle, renew=False)
            return
        self.core.claim(request.handle, len(text) + 1)
        served, _ = self.core.grow(ints(request.handle), ints(len(text)))
        assert served == 1
        self.fetch(request, before, hit, found)
        self.compute(request, text)
        self.running.append(request)
        if ends:
            self.end(len(self.running) - 1)

    @rule(
        stem=st.integers(0, 1),
        count=st.integers(9, 32),
        gone=st.sets(st.integers(0, 39), min_size=2, max_size=12),
        more=st.integers(1, 8),
        lost=st.sets(st.integers(0, 9), max_size=2),
    )
    def talk(self, stem: int, count: int, gone: set[int], more: int, lost: set[int]) -> None:
        """A turn is copied out, some of it goes from either tier, and the next turn comes."""
        text = [*STEMS[stem][:count], *[80 + count] * (count % 3)]
        self.ask(text, wanted=99, ends=True)
        self.next_step(wanted=99)
        self.balloon(gone)
        self.lose(text, lost)
        self.ask([*text, *[70] * more], wanted=0, ends=True)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9))
    def end(self, index: int) -> None:
        request = self.running.pop(index % len(self.running))
        self.prefixes.on_ended(request)
        self.core.close(request.handle)

    @rule(wanted=st.sampled_from([2, 99]))
    def next_step(self, wanted: int) -> None:
        """A plan copies out what the pool may be about to evict."""
        self.step += 1
        self.core.begin_step(self.step)
        self.buffer.settle()
        self.prefixes.begin()
        for index, page, held in self.prefixes.copy_out(wanted).tolist():
            self.in_buffer[index, held] = self.in_pool[index, page]

    @rule(larges=st.sets(st.integers(0, 39), max_size=4))
    def balloon(self, larges: set[int]) -> None:
        """Somebody else needs these large pages for a moment, whatever lies in them."""
        order = self.core.reclaim_order()
        going = [one for one in sorted(larges) if one < len(order) and order[one] < 1 << 62]
        self.core.withhold(ints(*going))
        self.core.restore(ints(*going))

    @rule(text=texts)
    def forget(self, text: list[int]) -> None:
        self.core.delete(ints(*text), "")

    @rule(count=st.integers(1, 6), index=st.integers(0, 1))
    def press(self, count: int, index: int) -> None:
        counts = [count if at == index else 0 for at in range(len(self.groups))]
        handle = self.core.reserve(ints(*counts), self.step)
        if handle:
            self.core.close(handle)

    @rule(text=texts, lost=st.sets(st.integers(0, 9), max_size=5))
    def lose(self, text: list[int], lost: set[int]) -> None:
        """Pages of the buffer make way for preempted requests."""
        digests = PrefixDigests(ints(*text, 0), "0:")
        tiers = Tiers(self.prefixes.pages, range(len(self.groups)), digests, self.known(text))
        places = list(tiers.places(len(text)))
        keys = [tiers.key(index, place) for index, _, place in places]
        self.prefixes.pages.forget(key for at, key in enumerate(keys) if at in lost)

    def known(self, text: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.int32]]":
        return self.core.known(ints(*text), "")

    def check_known(self, text: Sequence[int]) -> set[tuple[int, Place]]:
        """Places of a text in the pool, as the whole index says; the core says the same."""
        named = [
            (e.group, (e.end, e.part), e.page)
            for e in self.core.snapshot().index
            if e.end <= len(text)
            and self.in_pool[e.group, e.page] == self.content(text, e.group, (e.end, e.part))
        ]
        rows = sorted(
            (index, self.position(index, place), page, place[0]) for index, place, page in named
        )
        assert list(map(tuple, self.known(text).tolist())) == rows
        return {(index, place) for index, place, _ in named}

    def position(self, index: int, place: Place) -> int:
        spec = self.groups[index]
        return place[1] if spec.kind is GroupKind.STATE else (place[0] - 1) // spec.page_tokens

    def content(self, text: Sequence[int], index: int, place: Place) -> Content:
        return tuple(text[: place[0]]), index, place[1]

    def buffered(self, text: Sequence[int], index: int, place: Place) -> bool:
        """Whether a page of the buffer that is not free holds just this."""
        wanted = self.content(text, index, place)
        return any(
            self.in_buffer[one] == wanted
            for some in self.buffer.held.values()
            for one in some
            if one[0] == index
        )

    def longest(self, text: Sequence[int], found: set[tuple[int, Place]]) -> int:
        """By trying every length."""
        for length in range(len(text) - 1, 0, -1):
            if all(
                (index, place) in found or self.buffered(text, index, place)
                for index, spec in enumerate(self.groups)
                for _, place in needed_pages(spec, length)
            ):
                return length
        return 0

    def fetch(self, request: Request, before: Any, hit: int, found: set[tuple[int, Place]]) -> None:
        """Copy what comes; each page that the request goes on from has the right content."""
        text, computed = request.prompt.tolist(), request.computed
        counted = self.prefixes.hit_tokens
        rows = self.prefixes.copy_in(request, before).tolist()
        copies = self.core.copies().tolist()
        targets = [(index, page) for index, _, page in rows]
        targets += [(index, target) for _, index, _, target in copies]
        assert len(set(targets)) == len(targets), "one page comes from two places"
        for index, held, page in rows:
            self.in_pool[index, page] = self.in_buffer[index, held]
        for _, index, source, target in copies:
            self.in_pool[index, target] = self.in_pool[index, source]
        if computed == hit:
            assert not rows and self.prefixes.hit_tokens == counted
            return
        pages = {(g, at): page for _, g, at, page in self.core.held_pages(request.handle).tolist()}
        places = [
            (index, at, place)
            for index, spec in enumerate(self.groups)
            for at, place in needed_pages(spec, computed)
        ]
        for index, at, place in places:
            assert self.in_pool[index, pages[index, at]] == self.content(text, index, place)
        lacked = {(index, pages[index, at]) for index, at, place in places}
        lacked -= {(index, pages[index, at]) for index, at, p in places if (index, p) in found}
        assert {(index, page) for index, _, page in rows} == lacked, "only what the pool lacks"
        came = {
            token
            for index, _, place in places
            if (index, place) not in found
            for token in self.tokens_of(index, place, computed)
        }
        assert self.prefixes.hit_tokens - counted == len(came & set(range(hit, computed))) > 0
        self.note(
            [
                [(index, place) in found for _, place in needed_pages(spec, computed)]
                for index, spec in enumerate(self.groups)
            ]
        )

    def tokens_of(self, index: int, place: Place, computed: int) -> range:
        spec = self.groups[index]
        if spec.kind is GroupKind.STATE:
            return range(computed)
        return range((place[0] - 1) // spec.page_tokens * spec.page_tokens, place[0])

    def note(self, groups: Sequence[Sequence[bool]]) -> None:
        """Count what sort of hit it was: by group, whether each page was in the pool."""
        kinds = {
            "pool first": any(sorted(one, reverse=True) == one != sorted(one) for one in groups),
            "buffer first": any(not a and b for one in groups for a, b in pairwise(one)),
            "by group": len({one[0] for one in groups if one and len(set(one)) == 1}) == 2,
            "state from the pool": self.has_state and all(groups[-1]),
            "state from the buffer": self.has_state and not any(groups[-1]),
        }
        self.hits.update(kind for kind, is_so in kinds.items() if is_so)

    @property
    def has_state(self) -> bool:
        return self.groups[-1].kind is GroupKind.STATE

    def compute(self, request: Request, text: Sequence[int]) -> None:
        """A step: pages are written behind what is computed, states at its cuts and its end."""
        handle, end = request.handle, len(text)
        for _, index, cut, part, page in self.core.checkpoint(ints(handle), ints(end)).tolist():
            self.in_pool[index, page] = self.content(text, index, (cut, part))
        for _, index, at, page in self.core.held_pages(handle).tolist():
            spec = self.groups[index]
            if spec.kind is GroupKind.STATE:
                self.in_pool[index, page] = self.content(text, index, (end, at))
            elif (at + 1) * spec.page_tokens > request.computed:
                stop = min(end, (at + 1) * spec.page_tokens)
                self.in_pool[index, page] = self.content(text, index, (stop, 0))
        self.core.advance(ints(handle), ints(end))
        request.computed = request.settled = end
        request.output.append(0)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "core"):
            assert audit(self.core.layout, self.core.snapshot()) == []
            assert audit_pages(self.buffer) == []

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        while self.running:
            self.end(0)
        assert not any(self.core.snapshot().used)
        self.prefixes.let_go()
        assert self.buffer.used_large == 0
