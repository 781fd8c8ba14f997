"""A device whose pages say what is in them, and that checks whatever a step reads."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvell.engine.requests.plan import StepPlan, StepResult, TokenWork
from kvell.memory import GroupKind, GroupSpec, Ints, Layout
from kvell.simulator.cluster.device import Device
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import TraceRow

MASK = (1 << 62) - 1
Digests = list[int]
Pages = npt.NDArray[np.int64]


def extend(digest: int, token: int) -> int:
    return (digest * 6364136223846793005 + token + 1442695040888963407) & MASK


class Texts:
    """What every prefix of every request's text is called: equal texts have equal names."""

    def __init__(self, rows: list[TraceRow]) -> None:
        self.rows, self.prompts = rows, PromptMaker(rows)
        self._digests: dict[int, Digests] = {}

    def tokens(self, index: int) -> list[int]:
        output = [
            self.prompts.output_token(index, i) for i in range(self.rows[index].output_tokens)
        ]
        return [*self.prompts.prompt(index).tolist(), *output]

    def digests(self, index: int) -> Digests:
        """By length of the prefix."""
        if index not in self._digests:
            digests = [0]
            for token in self.tokens(index):
                digests.append(
                    (digests[-1] * 6364136223846793005 + token + 1442695040888963407) & MASK
                )
            self._digests[index] = digests
        return self._digests[index]


def readable_from(spec: GroupSpec, end: int) -> int:
    """The first position that the token at ``end`` reads."""
    if spec.kind is GroupKind.SLIDING:
        return max(0, end - spec.window_tokens + 1)
    if spec.kind is GroupKind.CHUNKED:
        return end // spec.window_tokens * spec.window_tokens
    return 0


class WrittenPages(Device):
    """Pages of digests: of a token the one of all tokens up to it, of a state its prefix's.

    A page that was evicted, shared, copied too late or written by a stale copy cannot pass.  What a
    row reads of others' pages must be right when its step begins and when it ends, unless it is
    missed; what it wrote is spoiled then.
    """

    def __init__(self, layout: Layout, texts: Texts) -> None:
        self._layout, self._texts = layout, texts
        super().__init__(texts.prompts)
        self._places: dict[int, dict[tuple[int, int], int]] = {}
        self._behind: dict[int, WrittenPages] = {}
        self.tokens_computed = self.borrowed_reads = 0

    @cached_property
    def memory(self) -> list[Pages]:
        """By group [pages, slots]."""
        return [np.full((self._pages(i), slots_of(g)), -1, np.int64) for i, g in self._groups]

    @property
    def _groups(self) -> list[tuple[int, GroupSpec]]:
        return list(enumerate(self._layout.groups))

    def _pages(self, group: int) -> int:
        return self._layout.num_large_pages * self._layout.groups[group].pages_per_large

    def read(self, source: "WrittenPages", rows: Ints) -> None:
        for group, page, own in rows.tolist():
            self.memory[group][own] = source.memory[group][page]

    def put_behind(self, source: "WrittenPages", first_large: int) -> None:
        assert first_large >= self._layout.num_large_pages
        assert all(abs(first_large - one) >= self._layout.num_large_pages for one in self._behind)
        self._behind[first_large] = source

    def drop_behind(self, first_large: int) -> None:
        del self._behind[first_large]

    def _page(self, group: int, page: int) -> Pages:
        if page < self._pages(group):
            own: Pages = self.memory[group][page]
            return own
        per_large = self._layout.groups[group].pages_per_large
        first = max(one for one in self._behind if one * per_large <= page)
        self.borrowed_reads += 1
        found: Pages = self._behind[first].memory[group][page - first * per_large]
        return found

    def run(self, plan: StepPlan) -> StepResult:
        for handle in plan.released:
            self._places.pop(handle, None)
        for copy in plan.copies:
            self.memory[copy.group][copy.target] = self._page(copy.group, copy.source)
        for handle, group, position, page in plan.new_pages.tolist():
            self._places.setdefault(handle, {})[group, position] = page
        borrows = {one.handle for one in plan.borrowed}
        self._away = dict(plan.away)
        self._wrong_at_first = {
            work.handle: wrong for work in plan.work if (wrong := self._wrong(work))
        }
        for handle, wrong in self._wrong_at_first.items():
            assert handle in borrows, wrong
        for work in plan.work:
            self._write(work, self._texts.digests(int(work.request_id)))
        for handle, group, tokens, _, page in plan.checkpoints.tolist():
            work = next(one for one in plan.work if one.handle == handle)
            self.memory[group][page] = self._texts.digests(int(work.request_id))[tokens]
        self.tokens_computed += plan.num_tokens
        return super().run(plan)

    def finish(self, plan: StepPlan, missed: Sequence[int]) -> None:
        borrows = {one.handle for one in plan.borrowed}
        for work in plan.work:
            if work.handle in missed:
                self._write(work, SPOILED)
            elif work.handle in borrows:
                wrong = self._wrong_at_first.get(work.handle) or self._wrong(work, elsewhere=True)
                assert not wrong, wrong
        for handle, group, _, _, page in plan.checkpoints.tolist():
            if handle in missed:
                self.memory[group][page] = SPOILED[0]

    def _wrong(self, work: TokenWork, *, elsewhere: bool = False) -> str:
        """What a row reads that is not what it should be; of others' pages alone, or of all."""
        index = int(work.request_id)
        known = self._texts.tokens(index)[work.start : work.start + work.count]
        assert work.token_ids.tolist() == known, f"request {index} computes another text"
        digests, places = self._texts.digests(index), self._places[work.handle]
        for group, spec in self._groups:
            if spec.kind is GroupKind.STATE:
                for state in range(spec.slices if work.start and not elsewhere else 0):
                    found = self.memory[group][places[group, state], 0]
                    if found != digests[work.start]:
                        return f"group {group} has another state"
                continue
            first = readable_from(spec, work.start)
            if spec.kind is GroupKind.FULL:  # creditors that are asked have the tokens before it
                first = max(first, self._away.get(work.handle, 0))
            for position in range(first, work.start):
                page = places[group, position // spec.page_tokens]
                if elsewhere and page < self._pages(group):
                    continue
                found = self._page(group, page)[position % spec.page_tokens]
                if found != digests[position + 1]:
                    return f"group {group} lost token {position}"
        return ""

    def _write(self, work: TokenWork, digests: Sequence[int]) -> None:
        places, end = self._places[work.handle], work.start + work.count
        for group, spec in self._groups:
            memory = self.memory[group]
            if spec.kind is GroupKind.STATE:
                for state in range(spec.slices):
                    memory[places[group, state]] = digests[end]
                continue
            for position in range(work.start, end):
                page = places.get((group, position // spec.page_tokens))
                if page is None:  # behind the window already
                    assert position < readable_from(spec, end), "a page was never allocated"
                    continue
                memory[page, position % spec.page_tokens] = digests[position + 1]


class _Spoiled(Sequence[int]):
    """What a row that does not count has written."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, position: Any) -> Any:
        return -7


SPOILED = _Spoiled()


def slots_of(spec: GroupSpec) -> int:
    return 1 if spec.kind is GroupKind.STATE else spec.page_tokens
