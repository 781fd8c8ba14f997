"""A model whose pages can be read back: it writes what a token depends on, and checks it.

Every token's entry in a page is a digest of all tokens up to it.  Before a token
is computed, every entry that its layers would read is compared with the request's
own prefix; a page that was evicted, shared or overwritten wrongly cannot pass.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvell.engine.requests.plan import (
    NOT_DRAWN,
    PENDING,
    TO_DRAFT,
    BorrowedPages,
    StepPlan,
    StepResult,
    TokenWork,
    verify,
)
from kvell.engine.running.batching import GroupArrays, PageTables
from kvell.engine.running.model_part import DrawnBefore
from kvell.pages.layout import GroupSpec, Layout

Page = npt.NDArray[np.int64]
VOCAB = 50
MASK = (1 << 62) - 1


def extend_digest(digest: int, token: int) -> int:
    return (digest * 6364136223846793005 + token + 1442695040888963407) & MASK


def next_token(digest: int, words: int = VOCAB) -> int:
    """The model's next token after a prefix: any fixed function will do.

    With few words it repeats itself, and draft tokens are often right.
    """
    return (digest >> 7) % words


def drafted_token(digest: int, words: int = VOCAB) -> int:
    """A draft model's next token after a prefix; right two times in three."""
    return (next_token(digest, words) + (digest >> 20) % 3 // 2) % words


FIRST_DIGEST = {False: 0, True: 1}
"""The digest of no tokens, by whether keys are rotated by the long table."""


def expected_output(
    prompt: list[int], count: int, words: int = VOCAB, short_rope_tokens: int = 0
) -> list[int]:
    """The only right answer, from the prompt alone."""
    digests, output = dict(FIRST_DIGEST), list[int]()
    for known in range(len(prompt) + count):
        if known >= len(prompt):
            is_long = 0 < short_rope_tokens < known
            output.append(next_token(digests[is_long], words))
        token = [*prompt, *output][known]
        digests = {table: extend_digest(digest, token) for table, digest in digests.items()}
    return output


def expected_vector(prompt: list[int]) -> bytes:
    """What the model says of a prompt in place of an answer: the digest of all its tokens."""
    digest = 0
    for token in prompt:
        digest = extend_digest(digest, token)
    return digest.to_bytes(8, "little")


def check_past(work: TokenWork, digests: list[int]) -> None:
    """Check that the past of a work is the text before its draft tokens."""
    assert work.past is not None and len(work.past) == work.start + work.known
    digest = FIRST_DIGEST[work.uses_long_rope]
    for token in work.past.tolist():
        digest = extend_digest(digest, token)
    assert digest == digests[len(work.past)]


class Beyond(Protocol):
    """Pages behind the own pool's, which are other models'."""

    def page(self, group: int, page: int) -> Page: ...

    def stands(self, pages: BorrowedPages) -> bool: ...

    def answer(self, pages: BorrowedPages) -> list[tuple[int, Page]] | None:
        """What a creditor that is asked reads: group and content, in order; None: nothing came."""
        ...


class VirtualModel:
    """Carries out plans over pages that hold digests instead of keys and values.

    :ivar beyond: pages of others, which plans may borrow.
    :param buffer: numbers of the CPU buffer's large pages, if passes write there.
    :param is_late: whether now and then a token after a right draft token is not drawn, as if the
        mask of its grammar were late.
    """

    def __init__(
        self,
        layout: Layout,
        words: int = VOCAB,
        buffer: range = range(0),
        is_late: bool = False,
    ) -> None:
        self.layout = layout
        self._buffer_larges = buffer
        self._words, self._is_late = words, is_late
        self._tables = PageTables(layout.groups)
        self.memory = [
            np.zeros((layout.num_large_pages * g.pages_per_large, g.page_tokens), np.int64)
            for g in layout.groups
        ]
        self._buffer: dict[tuple[int, int], Page] = {}
        self._digests: dict[int, list[int]] = {}
        self._drafted: list[TokenWork] = []
        self._before = DrawnBefore()
        self.tokens_computed = 0
        self.beyond: Beyond | None = None
        self.borrowed_reads = 0
        self._missed: set[int] = set()

    def run(self, plan: StepPlan) -> StepResult:
        self._tables.update(plan)
        for group, page, held in plan.offloads.tolist():
            self._buffer[group, held] = self.memory[group][page].copy()
        for group, held, page in plan.fetches.tolist():
            self.memory[group][page] = self._buffer[group, held]
        for copy in plan.copies:
            self.memory[copy.group][copy.target] = self._page(copy.group, copy.source)
        stands = None if self.beyond is None else self.beyond.stands
        self._missed = set(plan.find_missed(stands))
        self._ask(plan)
        for handle in plan.released:
            self._digests.pop(handle, None)
        arrays = [self._tables.arrays(g, plan.work) for g in range(len(self.layout.groups))]
        sampled = [self._compute(i, work, arrays) for i, work in enumerate(plan.work)]
        self.tokens_computed += plan.num_tokens
        plan = replace(plan, work=tuple(self._drafted))
        self._drafted.clear()
        result = verify(plan, [token for tokens in sampled for token in tokens])
        if plan.pools:
            result = structs.replace(result, pooled=self._vectors(plan))
        self._forget_wrong_draft_tokens(plan, result)
        self._before.note(plan, result)
        for handle in self._missed:
            del self._digests[handle]
        return structs.replace(result, missed=tuple(sorted(self._missed)))

    def _ask(self, plan: StepPlan) -> None:
        """Get what is elsewhere and not read in place: the first pages of requests' groups."""
        self._answers: dict[tuple[int, int], list[Page]] = {}
        for one in plan.borrowed if self.beyond is not None else ():
            answer = self.beyond.answer(one) if self.beyond and one.by_queries else []
            if answer is None:
                self._missed.add(one.handle)
            for group, page in answer or ():
                self._answers.setdefault((one.handle, group), []).append(page)

    def _vectors(self, plan: StepPlan) -> dict[int, bytes]:
        pooling = (work.handle for work in plan.work if work.pools)
        return {handle: self._digests[handle][-1].to_bytes(8, "little") for handle in pooling}

    def _forget_wrong_draft_tokens(self, plan: StepPlan, result: StepResult) -> None:
        """Forget what was computed after a wrong one; the pages still hold it."""
        sampling = [work for work in plan.work if work.samples]
        for work, tokens in zip(sampling, result.by_work(), strict=True):
            computed = work.start + work.count - work.proposed + len(tokens) - 1
            del self._digests[work.handle][computed + 1 :]

    def _compute(self, index: int, work: TokenWork, arrays: list[GroupArrays]) -> list[int]:
        digests = self._digests.setdefault(work.handle, self._resumed(index, work, arrays))
        assert len(digests) == work.start + 1, "a chunk did not continue where the last one ended"
        for group, array in enumerate(arrays):
            self._check_reads(group, index, work, array, digests)
        tokens = work.token_ids.tolist()
        for offset, planned in enumerate(tokens):
            if planned == PENDING:
                (tokens[offset],) = self._before.newest([work.handle])
            if planned == TO_DRAFT:
                tokens[offset] = drafted_token(digests[-1], self._words)
            digests.append(extend_digest(digests[-1], tokens[offset]))
            row = int(arrays[0].query_starts[index]) + offset
            for group, array in enumerate(arrays):
                page, place = int(array.write_page_ids[row]), int(array.write_offsets[row])
                self.own_page(group, page)[place] = digests[-1]
        self._drafted.append(structs.replace(work, token_ids=np.asarray(tokens, np.int32)))
        if work.past is not None and work.past[-1] != PENDING:
            check_past(work, digests)
        drawing = digests[len(digests) - work.num_logits :]
        return [
            NOT_DRAWN
            if place and self._is_late and digest % 5 == 0
            else next_token(digest, self._words)
            for place, digest in enumerate(drawing)
        ]

    def _resumed(self, index: int, work: TokenWork, arrays: list[GroupArrays]) -> list[int]:
        """Resume from a prefix hit: only the prefix's pages are known."""
        if not work.start:
            return [FIRST_DIGEST[work.uses_long_rope]]
        unknown = [-1] * (work.start + 1)
        for group, array in enumerate(arrays):
            for position, digest in self._read(group, index, work, array).items():
                assert unknown[position + 1] in (-1, digest), "groups resume different prefixes"
                unknown[position + 1] = digest
        return unknown

    def _read(self, group: int, index: int, work: TokenWork, array: GroupArrays) -> dict[int, int]:
        end = work.start
        spec = self.layout.groups[group]
        first = int(array.first_positions[index])
        start = int(array.table_starts[index])
        entries: dict[int, int] = {}
        if work.handle in self._missed:
            return entries  # whatever lies there, it does not count
        for position in range(readable_from(spec, end), end):
            at, place = divmod(position, spec.page_tokens)
            if at < first:
                self.borrowed_reads += 1
                entries[position] = int(self._answers[work.handle, group][at][place])
                continue
            page = int(array.page_ids[start + at - first])
            assert page >= 0, "a page that is needed was never allocated"
            entries[position] = int(self._page(group, page)[place])
        return entries

    def own_page(self, group: int, page: int) -> Page:
        """What a page of the pool holds, or one of the buffer, which begins anew as nothing."""
        if page < len(self.memory[group]):
            own: Page = self.memory[group][page]
            return own
        spec = self.layout.groups[group]
        assert page // spec.pages_per_large in self._buffer_larges, "a page of nobody"
        held = page - self._buffer_larges.start * spec.pages_per_large
        return self._buffer.setdefault((group, held), np.zeros(spec.page_tokens, np.int64))

    def _page(self, group: int, page: int) -> Page:
        large = page // self.layout.groups[group].pages_per_large
        if page < len(self.memory[group]) or large in self._buffer_larges:
            return self.own_page(group, page)
        assert self.beyond is not None, "nothing lies behind the pool"
        self.borrowed_reads += 1
        return self.beyond.page(group, page)

    def _check_reads(
        self, group: int, index: int, work: TokenWork, array: GroupArrays, digests: list[int]
    ) -> None:
        assert int(array.context_lens[index]) == work.start + work.count
        for position, digest in self._read(group, index, work, array).items():
            assert digest == digests[position + 1], f"group {group} lost token {position}"


def readable_from(spec: GroupSpec, end: int) -> int:
    """First position that the token at ``end`` reads."""
    return max(0, end - spec.window_tokens + 1) if spec.window_tokens else 0
