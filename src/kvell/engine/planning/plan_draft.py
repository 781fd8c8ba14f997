"""Step plans under construction."""

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from msgspec.structs import replace

from kvell.engine.requests.plan import PENDING, NewPages, TokenWork
from kvell.engine.requests.request import Request
from kvell.pages.rows import NewPageRow
from kvell.vocabulary import RequestId


class PlanDraft:
    """A step plan under construction: the scheduler's decisions so far.

    :ivar prompt_tokens_of: tokens of its prefill chunks, by tenant.
    :ivar has_scored: whether any work may have more rows of logits than it draws from.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.prompt_tokens_of: Counter[str] = Counter()
        self.has_scored = self.has_pooled = False
        self.work: list[TokenWork] = []
        self.preempted: list[RequestId] = []
        self.parked: list[RequestId] = []
        self.admitted: list[RequestId] = []
        self.forgotten: set[int] = set()
        self._pages: list[NewPages] = []
        self._offloads: list[NewPages] = []
        self._fetches: list[NewPages] = []

    def add_work(self, request: Request, count: int) -> None:
        start = request.computed
        pools = request.spec.pooling != "" and start + count == request.num_tokens
        self.has_scored |= request.is_scored
        self.has_pooled |= pools
        self.work.append(
            TokenWork(
                request.spec,
                request.handle,
                start,
                count,
                request.tokens(start, start + count),
                start + count == request.num_tokens,
                request.num_output,
                embedded=request.embedded,
                past=request.past(start + count) if not request.sampling.is_plain else None,
                pools=pools,
                uses_long_rope=request.uses_long_rope,
            )
        )
        self.budget -= count

    def add_decodes(self, requests: Sequence[Request]) -> None:
        """Add work for each request's newest token; the common case, so done in bulk."""
        newest = np.array([PENDING if r.drawing else r.output[-1] for r in requests], np.int32)
        for index, request in enumerate(requests):
            if request.repeats or not request.sampling.is_plain:
                self.add_work(request, request.remaining)
                continue
            self.work.append(
                TokenWork(
                    request.spec,
                    request.handle,
                    request.computed,
                    1,
                    newest[index : index + 1],
                    True,
                    len(request.output) + request.drawing,
                    embedded=request.embedded,
                    uses_long_rope=request.uses_long_rope,
                )
            )
            self.budget -= 1

    @property
    def num_logits(self) -> int:
        return sum(work.num_logits for work in self.work)

    def add_draft_tokens(self, index: int, tokens: NewPages) -> None:
        if not len(tokens):
            return
        work = self.work[index]
        count = len(tokens)
        self.work[index] = replace(
            work,
            count=work.count + count,
            token_ids=np.concatenate([work.token_ids, tokens]),
            proposed=count,
        )
        self.budget -= count

    def add_pages(self, rows: NewPages, handles: Sequence[int]) -> None:
        if len(rows):
            named = rows.copy()
            named[:, NewPageRow.HANDLE] = np.asarray(handles, np.int32)[rows[:, NewPageRow.HANDLE]]
            self._pages.append(named)

    def add_moved(self, rows: NewPages) -> None:
        if len(rows):
            self._pages.append(rows)

    def offload(self, rows: NewPages) -> None:
        """Add pages to copy to the CPU buffer [m, :class:`.OffloadRow`]."""
        if len(rows):
            self._offloads.append(rows)

    def fetch(self, rows: NewPages) -> None:
        """Add pages to copy back from the CPU buffer [m, :class:`.FetchRow`]."""
        if len(rows):
            self._fetches.append(rows)

    @property
    def offloads(self) -> NewPages:
        """All pages to copy out [m, :class:`.OffloadRow`]."""
        return np.concatenate(self._offloads) if self._offloads else np.empty((0, 3), np.int32)

    @property
    def fetches(self) -> NewPages:
        """All pages to copy back [m, :class:`.FetchRow`]."""
        return np.concatenate(self._fetches) if self._fetches else np.empty((0, 3), np.int32)

    def cut(self, ends: Collection[tuple[int, int]]) -> None:
        """Cut the handles' work at ``ends``, (handle, tokens), where it must yield its state."""
        cuts: dict[int, list[int]] = {}
        for handle, end in sorted(ends):
            cuts.setdefault(handle, []).append(end)
        self.work = [
            replace(work, cuts=tuple(cuts[work.handle])) if work.handle in cuts else work
            for work in self.work
        ]

    def forget(self, request: Request) -> None:
        self.forgotten.add(request.handle)
        gone = [work for work in self.work if work.handle == request.handle]
        self.work = [work for work in self.work if work.handle != request.handle]
        self.budget += sum(work.count for work in gone)
        self._pages = [rows[rows[:, NewPageRow.HANDLE] != request.handle] for rows in self._pages]

    def new_pages(self) -> NewPages:
        """Return all rows so far, in order [m, :class:`.NewPageRow`]."""
        return np.concatenate(self._pages) if self._pages else np.empty((0, 4), np.int32)
