"""The plan of one step, decided before anything is done, and its result.

A :class:`StepPlan` holds everything that touches memory, in order; a runner
carries it out and answers with a :class:`StepResult`.  Plans are equal if they
do the same: replaying a journal must give equal plans.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.vocabulary import PageId, RequestId, StepNumber

NewPages = npt.NDArray[np.int32]

TO_DRAFT = -1
"""Stands for a draft token that a draft model proposes when the step runs."""

NO_TOKEN = -1
"""Stands for the token of a request whose sampling allows none, or whose grammar is too complex;
NOT_NUMBERS for that of a request whose logits are not numbers."""

NOT_DRAWN = -3
"""Stands for the token after a draft token whose mask is late: the next step draws it."""

NONE_ASKED: Mapping[int, Any] = MappingProxyType({})

PENDING = -(1 << 31)
"""Stands for a token that the previous step draws; the runner fills it in when the step runs."""


class TokenWork(Struct, frozen=True, eq=False, gc=False):
    """The computation of tokens ``start … start+count-1`` of a request.

    :param handle: names the request's tables; never reused.
    :param token_ids: int32 [count], the tokens themselves, TO_DRAFT for draft tokens, or PENDING.
    :param samples: whether the last token before drafts yields a token.
    :param output_index: output position of that token.
    :param cuts: positions at which state groups must be able to give their state.
    :param proposed: number of draft tokens at the end of the tokens; each yields a token too,
        which counts if it and all draft tokens before it are accepted.
    :param embedded: number of leading images whose embeddings are in pages already.
    :param past: int32, the request's tokens up to the last one before drafts; for a scored prompt,
        all of the prompt.  Only for sampling that is not plain.
    :param pools: whether the vector of its last token is wanted, instead of the token it yields.
    :param uses_long_rope: whether its request's keys are rotated by the long one of two tables.
    """

    spec: RequestSpec
    handle: int
    start: int
    count: int
    token_ids: npt.NDArray[np.int32]
    samples: bool
    output_index: int
    cuts: tuple[int, ...] = ()
    proposed: int = 0
    embedded: int = 0
    past: npt.NDArray[np.int32] | None = None
    pools: bool = False
    uses_long_rope: bool = False

    @property
    def request_id(self) -> RequestId:
        return self.spec.request_id

    @property
    def scores(self) -> int | None:
        """Number of likeliest tokens to report at each position of the prompt, for which all these
        tokens need logits; None: the prompt is not scored."""
        is_prompt = self.start < self.spec.prompt_tokens - 1
        return self.spec.sampling.prompt_logprobs if is_prompt else None

    @property
    def known(self) -> int:
        """Number of tokens before its draft tokens."""
        return self.count - self.proposed

    @property
    def draft_tokens(self) -> npt.NDArray[np.int32]:
        """Its draft tokens, int32."""
        return self.token_ids[self.known :]

    @property
    def num_draws(self) -> int:
        """Number of tokens that are drawn at its end."""
        return 1 + self.proposed if self.samples else 0

    @property
    def num_logits(self) -> int:
        """Number of tokens at its end that must give logits."""
        if self.spec.sampling.prompt_logprobs is not None and self.scores is not None:
            return self.count
        return 1 + self.proposed if self.samples else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenWork) and _same(self, other, self.__struct_fields__)

    def __hash__(self) -> int:
        return hash((self.request_id, self.start, self.count))


@dataclass(frozen=True)
class PageCopy:
    """The copy of a logical page of a group onto another, before the step computes."""

    group: int
    source: PageId
    target: PageId


class BorrowedPages(NamedTuple):
    """Pages of another instance that a step reads for a request.

    :param handle: handle of the request.
    :param instance: the creditor, and its ``incarnation``.
    :param right: number of the creditor's right for this instance to read them; 0: it is revoked.
    :param by_queries: whether the creditor computes attention over them; else they are read in
        place.  With queries, these are all pages that a request borrows, in order of sections.
    """

    handle: int
    instance: str
    incarnation: int
    right: int
    by_queries: bool = False


@dataclass(frozen=True)
class StepSlot:
    """The chunks of the activation range for a step, if activations share a pool with KV.

    The slot is granted with the plan and released when the next step is planned, so the step's
    result is the fence.

    :param start: position of its first chunk.
    """

    start: int
    num_chunks: int


@dataclass(frozen=True)
class StepPlan:
    """Everything step ``step`` does, in the order of the fields.

    :param released: handles whose tables may be forgotten.
    :param offloads: int32 [m, :class:`.OffloadRow`], pages copied to the CPU buffer before anything
        else is done.
    :param fetches: int32 [m, :class:`.FetchRow`], pages copied back from it.
    :param copies: pages copied before they are written (copy-on-write), or back from creditors.
    :param new_pages: int32 [m, :class:`.NewPageRow`], logical pages; numbers after the own pool's
        are pages of other instances (:mod:`kvell.mempool.transports.neighbours`).
    :param work: decodes first, then prefill chunks in order of admission.
    :param checkpoints: int32 [m, :class:`.CheckpointRow`], state pages written at cuts.
    :param preempted: requests that lost their pages to this plan.
    :param parked: requests whose pages are copied to the CPU buffer, where they wait.
    :param admitted: requests that run from this step on.
    :param slot: memory for the activations of ``work``; None if they have a reserve.
    :param pools: whether any of ``work`` may return a vector.
    :param streams: numbers of the transfers whose pages are pulled while ``work`` is computed; the
        runner reports its progress to the receivers.
    :param borrowed: pages of other instances that the step reads.  Rows whose right is revoked when
        the step has read them are missed (:attr:`StepResult.missed`).
    :param away: (handle, tokens) of work whose first tokens are in no page of full attention here:
        their creditors compute attention over them.
    """

    step: StepNumber
    released: tuple[int, ...] = ()
    offloads: NewPages = field(default_factory=lambda: np.empty((0, 3), np.int32))
    fetches: NewPages = field(default_factory=lambda: np.empty((0, 3), np.int32))
    copies: tuple[PageCopy, ...] = ()
    new_pages: NewPages = field(default_factory=lambda: np.empty((0, 4), np.int32))
    work: tuple[TokenWork, ...] = ()
    checkpoints: NewPages = field(default_factory=lambda: np.empty((0, 5), np.int32))
    preempted: tuple[RequestId, ...] = ()
    parked: tuple[RequestId, ...] = ()
    admitted: tuple[RequestId, ...] = ()
    slot: StepSlot | None = None
    pools: bool = False
    streams: tuple[int, ...] = ()
    borrowed: tuple[BorrowedPages, ...] = ()
    away: tuple[tuple[int, int], ...] = ()

    @cached_property
    def num_tokens(self) -> int:
        return sum(work.count for work in self.work)

    @property
    def is_idle(self) -> bool:
        return not (self.work or self.preempted or self.released)

    @cached_property
    def num_logits(self) -> int:
        return sum(work.num_logits for work in self.work)

    def find_missed(self, stands: Callable[[BorrowedPages], bool] | None) -> tuple[int, ...]:
        """Return the requests whose pages, read in place, may have been reused in the meantime.

        Call it after all reads: a right that is valid then was valid during them.

        :param stands: returns whether pages may still be read; None: none may.
        """
        read = [pages for pages in self.borrowed if not pages.by_queries]
        gone = {pages.handle for pages in read if stands is None or not stands(pages)}
        return tuple(sorted(gone))

    def __eq__(self, other: object) -> bool:
        names = [item.name for item in fields(self)]
        return isinstance(other, StepPlan) and _same(self, other, names)

    def __hash__(self) -> int:
        return hash((self.step, self.work))


class TeamTime(Struct, frozen=True, gc=False):
    """The time of a step's threads, and the part lost to other programs on their processors.

    :param threads: number of threads that computed the step; the largest of several models.
    :param is_shared: whether they shared work as if other programs used their processors.
    :param thread_seconds: duration of the passes, times their threads.
    :param lost_seconds: the part in which a thread could have run and another program did.
    """

    threads: int
    is_shared: bool
    thread_seconds: float
    lost_seconds: float


class StepResult(Struct, frozen=True, gc=False):
    """The tokens that a step sampled, in the order of its sampling work.

    :param token_ids: NO_TOKEN or NOT_NUMBERS if the request cannot continue.
    :param counts: number of tokens of each sampling work; empty if each has one.
    :param logprobs: by handle, logprobs of the drawn tokens, for requests that asked for them.
    :param scored: by handle, logprobs of the prompt tokens after the computed ones; empty if logits
        are not numbers.
    :param missed: handles whose tokens do not count, since pages that they borrowed may have been
        read too late.
    :param pooled: by handle, vectors of prompts, float32 as little-endian bytes; empty if they are
        not numbers.
    :param team: threads of compiled passes; None: there was no such pass.
    """

    step: StepNumber
    token_ids: tuple[int, ...]
    counts: tuple[int, ...] = ()
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = NONE_ASKED
    scored: Mapping[int, tuple[TokenLogprobs, ...]] = NONE_ASKED
    pooled: Mapping[int, bytes] = NONE_ASKED
    missed: tuple[int, ...] = ()
    team: TeamTime | None = None

    def by_work(self) -> list[tuple[int, ...]]:
        """Return the tokens of each sampling work.

        :raises ValueError: if the counts are not those of the tokens.
        """
        if not self.counts:
            return [(token,) for token in self.token_ids]
        ends = list(accumulate(self.counts))
        if ends[-1] != len(self.token_ids) or min(self.counts) < 1:
            raise ValueError(f"{len(self.token_ids)} tokens are not {self.counts}")
        return [
            self.token_ids[end - count : end] for end, count in zip(ends, self.counts, strict=True)
        ]


def _same(left: object, right: object, names: Iterable[str]) -> bool:
    for name in names:
        a, b = getattr(left, name), getattr(right, name)
        same = np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        if not same:
            return False
    return True


def verify(plan: StepPlan, sampled: Sequence[int]) -> StepResult:
    """Return a step's result: each work's tokens through the first that differs from its draft.

    :param sampled: the token drawn from each row of the step's logits, in order.
    """
    if not any(work.proposed for work in plan.work):
        return StepResult(plan.step, tuple(sampled))
    tokens: list[int] = []
    counts: list[int] = []
    start = 0
    for work in plan.work:
        if work.samples:
            kept = _kept(work, sampled[start : start + work.num_draws])
            start += work.num_draws
            tokens.extend(kept)
            counts.append(len(kept))
    return StepResult(plan.step, tuple(tokens), tuple(counts))


def _kept(work: TokenWork, sampled: Sequence[int]) -> Sequence[int]:
    draft_tokens = work.draft_tokens.tolist()
    right = next(
        (i for i, draft_token in enumerate(draft_tokens) if draft_token != sampled[i]),
        len(draft_tokens),
    )
    kept = sampled[: right + 1]
    return kept[:-1] if kept[-1] == NOT_DRAWN else kept
