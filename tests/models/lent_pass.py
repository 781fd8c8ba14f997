"""Steps of tiny models whose first sections other pools hold, in one process."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch

from kvell.attention.interface import GroupBatch
from kvell.models.forward.forward_batch import ForwardBatch
from kvell.models.paged_model import PagedModel
from kvell.models.partials import _partials
from kvell.models.partials.attention_service import AttentionService
from kvell.models.partials.remote_sections import RemoteSections, SectionRun
from kvell.models.partials.served_layers import ServedLayers
from kvell.vocabulary import SECTION_TOKENS
from tests.models.fused_models import bf16_module, fused_model, generic_model
from tests.models.harness import PAGE_TOKENS, PagedRunner, prompt_ids, runner_over, tiny_module

SECTION_PAGES = SECTION_TOKENS // PAGE_TOKENS
NAMES = ("a", "b", "c")
CONTEXT = 1700
"""Tokens whose keys and values every request of a prefix has."""
AFTER = 4
WORDS, DEBTOR = 64, 7
PATIENCE_SECONDS = 60.0
"""Of passes whose creditors answer: never waited for."""
ROOM_BYTES = 256 << 10
MOST_QUERIES = 8


@dataclass(frozen=True)
class Prefix:
    """A model, and the pool of a runner whose requests have all of their pages filled."""

    model: PagedModel
    runner: PagedRunner
    filled: torch.Tensor
    ids: Mapping[str, list[int]]


@cache
def prefix_of(architecture: str, dtype: torch.dtype, threads: int, is_fused: bool = True) -> Prefix:
    """Three requests of ``CONTEXT`` tokens; what follows a shorter part of them may be computed."""
    made = tiny_module if dtype is torch.float32 else bf16_module
    over = fused_model if is_fused else generic_model
    return filled_prefix(over(made(architecture), num_threads=threads), NAMES, CONTEXT)


def filled_prefix(model: PagedModel, names: Sequence[str], context: int) -> Prefix:
    """Requests of so many tokens, whose pages are filled, and a few ids after them."""
    runner = runner_over(model, large_pages=110 * len(names))
    ids = {name: prompt_ids(context + AFTER, seed) for seed, name in enumerate(names)}
    for name in names:
        runner.step([(name, ids[name][:context])])
    return Prefix(model, runner, runner.pool.clone(), ids)


def called(
    post: Callable[[bytes], bool], take: Callable[[float], bytes | None]
) -> _partials.Creditor:
    return _partials.CalledCreditor(1 << 20, post, take)


@dataclass(frozen=True)
class Work:
    """One request's part of a step.

    :param before: tokens that are computed already.
    :param new: tokens of the step.
    :param owners: the creditor of each of its first sections.
    """

    before: int
    new: int
    owners: tuple[str, ...] = ()


class CalledLine:
    """A debtor's way to a service of the same process, whose answers are computed when wanted.

    :ivar posted: queries that were accepted.
    :param most: the number of unanswered queries from which on more are refused.
    :param answers: whether it answers from the start; until :meth:`start` it is silent.
    """

    def __init__(self, answer: Callable[[bytes], bytes], most: int, answers: bool) -> None:
        self.posted = 0
        self._answer, self._most, self._answers = answer, most, answers
        self._queries: deque[bytes] = deque()
        self._came: deque[bytes] = deque()

    def start(self) -> None:
        self._answers = True
        self._came.extend(map(self._answer, self._queries))
        self._queries.clear()

    def post(self, query: bytes) -> bool:
        if len(self._queries) >= self._most:
            return False
        self.posted += 1
        self._queries.append(query)
        return True

    def take(self, seconds: float) -> bytes | None:
        if not self._answers:
            time.sleep(seconds)
            return None
        return self._came.popleft() if self._came else self._answer(self._queries.popleft())


class Lender:
    """A creditor with a pool of its own, its service, and one debtor's line.

    :param starts: whether it answers from the start.
    """

    def __init__(
        self,
        prefix: Prefix,
        seed: int,
        *,
        most: int = MOST_QUERIES,
        room_bytes: int = ROOM_BYTES,
        starts: bool = True,
    ) -> None:
        self.prefix = prefix
        layout, model = prefix.runner.layout, prefix.model
        self.pool = torch.full((layout.pool_bytes,), 0xFF, dtype=torch.uint8)
        served = model.served_layers
        assert served is not None
        layers = tuple(
            replace(layer, pages=replace(layer.pages, pool=self.pool)) for layer in served.layers
        )
        self.layers: ServedLayers = replace(served, layers=layers)
        self.words = np.zeros(WORDS, np.uint64)
        self.service = AttentionService(self.layers, self.words)
        self.line = CalledLine(partial(self.service.answer, DEBTOR), most, starts)
        self.creditor = _partials.CalledCreditor(room_bytes, self.line.post, self.line.take)
        self._right = 0
        self._free = [
            torch.randperm(
                layout.num_large_pages * group.pages_per_large,
                generator=torch.Generator().manual_seed(seed),
            ).tolist()
            for group in layout.groups
        ]

    def pages(self) -> list[list[int]]:
        full = self.layers.full_groups
        return [
            [free.pop() for _ in range(SECTION_PAGES)] if index in full else []
            for index, free in enumerate(self._free)
        ]

    def lend(self, name: str, section: int) -> int:
        """Hold a copy of a request's section; returns the right to read it."""
        pages = self.pages()
        self._right += 1
        self.words[self._right] = self._right
        runner = self.prefix.runner
        for group in self.layers.full_groups:
            stride = runner.layout.groups[group].page_stride_bytes
            own = runner.requests[name].pages[group][section * SECTION_PAGES :][:SECTION_PAGES]
            for source, to in zip(own, pages[group], strict=True):
                copied = self.prefix.filled[source * stride : (source + 1) * stride]
                self.pool[to * stride : (to + 1) * stride] = copied
        self.service.lend(self._right, DEBTOR, pages)
        return self._right

    def revoke(self, right: int) -> None:
        """Clear a right's word, as the owner of the pages does first of all."""
        self.words[right] = 0


def local_logits(prefix: Prefix, works: Sequence[Work]) -> torch.Tensor:
    """Logits of the step where all pages are local, [all new tokens, vocab]."""
    return prefix.model.forward(_batch(prefix, works)).clone()


def lent_runs(lenders: Mapping[str, Lender], works: Sequence[Work]) -> list[SectionRun]:
    """Let creditors hold the sections that are elsewhere; what the pass asks for."""
    runs = []
    for request, work in enumerate(works):
        first = 0
        while first < len(work.owners):
            end = first
            while end < len(work.owners) and work.owners[end] == work.owners[first]:
                end += 1
            lender = lenders[work.owners[first]]
            rights = tuple(lender.lend(NAMES[request], one) for one in range(first, end))
            runs.append(SectionRun(request, work.owners[first], first, rights))
            first = end
    return runs


def lent_logits(
    prefix: Prefix,
    works: Sequence[Work],
    elsewhere: RemoteSections,
    runs: Sequence[SectionRun],
    patience_seconds: float = PATIENCE_SECONDS,
    change: Callable[[ForwardBatch], ForwardBatch] = lambda batch: batch,
) -> torch.Tensor:
    """The same of a step whose tables leave out what is elsewhere; pages of that hold NaN."""
    batch, runner = _batch(prefix, works), prefix.runner
    model = prefix.model
    assert model.served_layers is not None
    model.elsewhere = elsewhere
    groups = list(batch.groups)
    for index in model.served_layers.full_groups:
        group = groups[index]
        assert isinstance(group, GroupBatch)
        groups[index] = without_sections(group, [len(work.owners) for work in works])
        for request, work in enumerate(works):
            away = runner.requests[NAMES[request]].pages[index][: len(work.owners) * SECTION_PAGES]
            for page in away:
                runner.page_bytes(index, page).fill_(0xFF)
    elsewhere.expect(runs, patience_seconds)
    lent = change(replace(batch, groups=tuple(groups)))
    logits = model.forward(lent).clone()
    model.elsewhere = None
    return logits


def without_sections(group: GroupBatch, sections: Sequence[int]) -> GroupBatch:
    """A batch whose tables begin behind each request's first sections."""
    tables = [
        group.page_ids[start:end][count * SECTION_PAGES :]
        for start, end, count in zip(
            group.table_starts[:-1].tolist(),
            group.table_starts[1:].tolist(),
            sections,
            strict=True,
        )
    ]
    lengths = torch.tensor([0, *(len(table) for table in tables)], dtype=torch.int32)
    firsts = group.first_positions + torch.tensor(sections, dtype=torch.int32) * SECTION_PAGES
    starts = lengths.cumsum(0).to(torch.int32)
    return replace(group, page_ids=torch.cat(tables), table_starts=starts, first_positions=firsts)


def rows_of(works: Sequence[Work], request: int) -> slice:
    begin = sum(work.new for work in works[:request])
    return slice(begin, begin + works[request].new)


def _batch(prefix: Prefix, works: Sequence[Work]) -> ForwardBatch:
    runner = prefix.runner
    runner.pool.copy_(prefix.filled)
    step = []
    for name, work in zip(NAMES, works, strict=False):
        runner.requests[name].computed = work.before
        step.append((name, prefix.ids[name][work.before : work.before + work.new]))
    return runner.batch(step)
