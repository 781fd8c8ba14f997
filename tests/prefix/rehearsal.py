"""An engine without a model over a memory core: checks all that the core says and gives.

After each call the audit runs; hits and refusals are compared with :mod:`obvious`, and
what a request would read with what was written there (:mod:`contents`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvell.memory import create_core
from kvell.pages.audit import audit
from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.pages.snapshot import IndexEntry, PoolSnapshot
from kvell.prefix.groups.facts import facts_of
from tests.oracle.index.seen import content_tokens
from tests.prefix.contents import PARTS, Contents, Prefixes
from tests.prefix.mixes import Prompt
from tests.prefix.obvious import Held, Question, drops, longest_run, pages_needed
from tests.prefix.reading import Reader, Request
from tests.prefix.story import ints


class Rehearsal:
    def __init__(self, layout: Layout) -> None:
        self.core = create_core(layout)
        self.contents = Contents(layout)
        self.reader = Reader(self.contents)
        self.prefixes = Prefixes()
        self.step = 0
        self.requests: dict[int, Request] = {}
        self.known: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.state = self.check()

    @property
    def running(self) -> list[Request]:
        return [r for r in self.requests.values() if r.lease_until is None]

    @property
    def leases(self) -> list[Request]:
        return [r for r in self.requests.values() if r.lease_until is not None]

    def next_step(self) -> None:
        self.step += 1
        self.core.begin_step(self.step)
        for lease in self.leases:
            if lease.lease_until is not None and lease.lease_until < self.step:
                del self.requests[lease.handle]
        self.check()

    def open(
        self,
        prompt: Prompt,
        model: str,
        root: str,
        *,
        generated: Sequence[int] = (),
        lease_until: int | None = None,
        reuse: bool = True,
        extra: int = 0,
    ) -> Request:
        tokens = [*prompt.tokens, *generated]
        options: dict[str, Any] = {
            "images": prompt.images,
            "prompt_tokens": len(prompt.tokens) if generated else None,
            "model": model,
        }
        facts = facts_of(len(tokens), len(prompt.tokens), prompt.images)
        own = [(i, g) for i, g in enumerate(self.core.layout.groups) if g.model == model]
        chain = self.prefixes.chain(f"{model}|{root}", tokens)
        question = Question(own, set(self.known.values()), self.written(own), chain, facts)
        expected = self.core.peek(ints(tokens), root, **options) if reuse else 0
        if reuse:
            assert question.promised() <= expected <= question.most()
        handle = self.core.open(ints(tokens), root, lease_until, reuse=reuse, **options)
        assert self.core.hit_tokens(handle) == expected
        self.check()
        request = Request(
            handle, model, root, prompt, facts, own, tokens, chain, expected, lease_until
        )
        for image in facts.images:
            content = self.prefixes.chain(
                f"images|{model}|{root}", tokens[image.start :][: content_tokens(image)]
            )
            request.shown[image.start] = content[-1]
        self.requests[handle] = request
        if lease_until is None:
            self.core.claim(handle, len(tokens) + extra)
        self.check()
        return request

    def claim(self, lease: Request, extra: int) -> None:
        self.core.claim(lease.handle, len(lease.tokens) + extra)
        lease.lease_until = None
        self.check()

    def grow(self, requests: Sequence[Request], until: Sequence[int]) -> int:
        """As many from the front as there is room for, which is as many as there must be."""
        needs = [self.needs(r, n) for r, n in zip(requests, until, strict=True)]
        right = longest_run(self.core.layout, self.state, needs)
        handles = ints([r.handle for r in requests])
        served, rows = self.core.grow(handles, ints(until))
        assert served == right
        given = [(g, page) for _, g, _, page in rows.tolist()]
        assert len(set(given)) == len(given)
        assert len(given) == sum(map(sum, needs[:served]))
        for index, group, position, page in rows.tolist():
            self.contents.given(group, page)
            if position < self._held(requests[index])[group].first:
                self._come_home(requests[index], group, position, page)
        self.check()
        return served

    def _come_home(self, request: Request, group: int, position: int, page: int) -> None:
        """A page whose tokens lay elsewhere is filled."""
        start = position * self.core.layout.groups[group].page_tokens
        assert start >= request.facts.away_tokens
        values = request.chain[start : start + self.core.layout.groups[group].page_tokens]
        self.contents.write(group, {position: page}, start, values)

    def send_away(self, request: Request, whole: int) -> None:
        full = [g.page_tokens for _, g in request.own if g.kind is GroupKind.FULL]
        refused = any(g.kind is GroupKind.DROPPING or g.counts_images for _, g in request.own)
        if refused or not full or len(self.core.sources(request.handle)):
            return
        unit = math.lcm(*full)
        away = unit * min(whole, request.computed // unit)
        self.core.send_away(request.handle, away)
        request.facts = replace(request.facts, away_tokens=away)
        self.check()

    def compute(
        self, requests: Sequence[Request], until: Sequence[int], most_large: int = 0
    ) -> None:
        """The step runs: copies, then all that is read and written, then it is told.

        :param most_large: large pages that may be gathered before.
        """
        handles = ints([r.handle for r in requests])
        kept = self.core.checkpoint(handles, ints(until)).tolist()
        for _, group, _, _, page in kept:
            self.contents.given(group, page)
        self.check()
        for _, group, _, page in self.core.compact(most_large).tolist():
            self.contents.given(group, page)
        for handle, group, source, target in self.core.copies().tolist():
            if handle in self.requests:
                self.contents.copy(group, source, target)
                self.known.pop((group, target), None)
        self.check()
        for request, end in zip(requests, until, strict=True):
            self.reader.run(request, self.pages(request), end, self.state)
        for index, group, end, part, page in kept:
            assert requests[index].computed < end <= until[index]
            self.reader.write_state(group, page, requests[index].chain[end - 1], part)
        self.core.advance(handles, ints(until))
        self.check()
        for request, end in zip(requests, until, strict=True):
            before, request.computed = request.computed, end
            self.reader.drop(request, before, self.pages(request), self.state)

    def append(self, requests: Sequence[Request], token: int) -> None:
        handles = ints([r.handle for r in requests])
        self.core.append(handles, np.full(len(requests), token, np.int32))
        for request in requests:
            request.tokens.append(token)
            root = f"{request.model}|{request.root}"
            request.chain = self.prefixes.chain(root, request.tokens, request.chain)

    def serve(self, prompt: Prompt, until: int, model: str = "") -> Request:
        """A new step, and a request that is computed up to ``until``."""
        self.next_step()
        request = self.open(prompt, model, "")
        self.reach(request, until)
        return request

    def reach(self, request: Request, until: int) -> None:
        assert self.grow([request], [until]) == 1
        self.compute([request], [until])

    def finish(self, prompt: Prompt, model: str = "") -> int:
        request = self.serve(prompt, len(prompt.tokens), model)
        hit = self.core.hit_tokens(request.handle)
        self.close(request, renew=True)
        return hit

    def peek(self, prompt: Prompt, model: str = "") -> int:
        return self.core.peek(ints(prompt.tokens), "", images=prompt.images, model=model)

    def close(self, request: Request, *, renew: bool) -> None:
        self.core.close(request.handle, renew=renew)
        del self.requests[request.handle]
        self.check()

    def register(self, groups: Sequence[GroupSpec]) -> None:
        self.core.register(groups)
        self.contents.add_groups(groups)
        self.check()

    def largest(self, request: Request, wanted: int) -> int:
        """As the core says, which is exactly what growth grants."""
        until = self.core.largest(request.handle, wanted)
        assert request.computed <= until <= wanted
        layout = self.core.layout
        if until > request.computed:
            assert longest_run(layout, self.state, [self.needs(request, until)])
        stop = wanted
        if request.computed < request.facts.prompt_tokens and self._drops(request):
            stop = min(stop, request.facts.prompt_tokens)
        if until < stop:
            assert not longest_run(layout, self.state, [self.needs(request, until + 1)])
        return until

    def needs(self, request: Request, until: int) -> list[int]:
        held = self._held(request)
        need = [0] * len(held)
        for index, group in request.own:
            facts, computed = request.facts, request.computed
            need[index] = pages_needed(group, facts, held[index], computed, until)
        return need

    def pages(self, request: Request) -> list[dict[int, int]]:
        """Per group: position → page."""
        pages: list[dict[int, int]] = [{} for _ in self.core.layout.groups]
        for _, group, position, page in self.core.held_pages(request.handle).tolist():
            pages[group][position] = page
        return pages

    def written(self, own: list[tuple[int, GroupSpec]]) -> set[tuple[int, int]]:
        """(group, prefix) of every token in pages that the index names."""
        indices = {index for index, _ in own}
        return {
            (group, prefix)
            for group, page in self.known
            if group in indices
            for prefix in self.contents.whole(group, page)
        }

    def check(self) -> PoolSnapshot:
        """The audit, and that every name in the index tells what its page holds."""
        layout, state = self.core.layout, self.core.snapshot()
        self.state = state
        assert audit(layout, state) == []
        before, self.known = self.known, {}
        for entry in state.index:
            page = entry.group, entry.page
            self.known[page] = self._named(entry)
            assert before.get(page, self.known[page]) == self.known[page]
        assert len(set(self.known.values())) == len(self.known), "a prefix is named twice"
        return state

    def _named(self, entry: IndexEntry) -> tuple[int, int, int]:
        """What an entry of the index promises, read off the page it names."""
        if self.core.layout.groups[entry.group].kind.counts_tokens:
            prefix = self.contents.last(entry.group, entry.page, entry.end)
        else:
            prefix, part = divmod(self.contents.whole(entry.group, entry.page)[0], PARTS)
            assert part == entry.part
        assert self.prefixes.lengths[prefix] == entry.end
        return entry.group, prefix, entry.part

    def _held(self, request: Request) -> list[Held]:
        holders = {h.handle: h.groups for h in self.state.holders}
        return [Held(first, first + len(pages)) for first, pages in holders[request.handle]]

    def _drops(self, request: Request) -> bool:
        return any(drops(group, request.facts) for _, group in request.own)
