"""The plan of one step, decided before anything is done, and its result.

A :class:`StepPlan` holds everything that touches memory, in order; a runner
carries it out and answers with a :class:`StepResult`.  Plans are equal if they
do the same: replaying a journal must give equal plans.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.vocabulary import RequestId, StepNumber

NewPages = npt.NDArray[np.int32]

TO_DRAFT = -1
"""Stands for a draft token that a draft model proposes when the step runs."""

NO_TOKEN = -1
"""Stands for the token of a request whose grammar has become too complex to follow; NOT_NUMBERS for
that of one whose logits are no numbers."""

NONE_ASKED: Mapping[int, Any] = MappingProxyType({})

PENDING = -(1 << 31)
"""Stands for a token that the step before draws; the runner fills it in when the step runs."""


class TokenWork(Struct, frozen=True, eq=False, gc=False):
    """Compute tokens ``start … start+count-1`` of a request.

    :param handle: names the request's tables; never reused.
    :param token_ids: int32 [count], the tokens themselves, TO_DRAFT for draft tokens, or PENDING.
    :param sampling: how the last known of them yields a token; None if it yields none.
    :param output_index: output position of that token.
    :param cuts: positions at which state groups must be able to give their state.
    :param proposed: number of draft tokens at the end of the tokens; each yields a token too,
        which counts if it and all draft tokens before it are accepted.
    :param images: of the request's prompt: (first token, tokens there, image tokens).
    :param image_ids: the ids that stand for them in the prompt.
    :param embedded: number of leading images whose embeddings are in pages already.
    :param prompt_tokens: length of the request's prompt.
    :param model: which of several models computes them.
    :param past: int32, the request's tokens from the first up to the last of these; for a prompt
        whose tokens are scored, all of the prompt.  Only for sampling that is not plain.
    :param scores: not None if all these tokens give logits, to tell how likely the prompt was,
        and so many of the likeliest tokens at each position.
    :param uses_long_rope: whether its request's keys are rotated by the long of two tables.
    :param pools: whether the vector of its last token is wanted, in place of the token it yields.
    """

    request_id: RequestId
    handle: int
    start: int
    count: int
    token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams | None
    output_index: int
    cuts: tuple[int, ...] = ()
    proposed: int = 0
    images: tuple[tuple[int, int, int], ...] = ()
    image_ids: tuple[int, ...] = ()
    embedded: int = 0
    prompt_tokens: int = 0
    model: str = ""
    past: npt.NDArray[np.int32] | None = None
    scores: int | None = None
    pools: bool = False
    uses_long_rope: bool = False

    @property
    def known(self) -> int:
        """Number of tokens before its draft tokens."""
        return self.count - self.proposed

    @property
    def samples(self) -> bool:
        """Whether the work yields a token."""
        return self.sampling is not None

    @property
    def num_draws(self) -> int:
        """Number of tokens that are drawn, at its end."""
        return 0 if self.sampling is None else 1 + self.proposed

    @property
    def num_logits(self) -> int:
        """Number of tokens at its end that must give logits."""
        return self.num_draws if self.scores is None else self.count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenWork) and _same(self, other, self.__struct_fields__)

    def __hash__(self) -> int:
        return hash((self.request_id, self.start, self.count))


@dataclass(frozen=True)
class PageCopy:
    """Copy a logical page of a group onto another, before the step computes."""

    group: int
    source: int
    target: int


class BorrowedPages(NamedTuple):
    """Pages of another instance that a step reads for a request.

    :param handle: of the request.
    :param instance: the creditor, and its ``incarnation``.
    :param right: the number under which the creditor lets this instance read them; 0: it is gone.
    :param by_queries: whether the creditor is asked for attention over them; else they are read in
        place.  Then a request's are all that it borrows, from its first section on, in order.
    """

    handle: int
    instance: str
    incarnation: int
    right: int
    by_queries: bool = False


@dataclass(frozen=True)
class StepSlot:
    """A step's activations where they share a pool with KV: chunks of the activation range.

    Granted with the plan and released when the next step is planned, so the step's result is the
    fence.

    :param start: position of its first chunk.
    """

    start: int
    num_chunks: int


@dataclass(frozen=True)
class StepPlan:
    """Everything step ``step`` does, in the order of the fields.

    :param released: handles whose tables may be forgotten.
    :param offloads: int32 [m, 3], pages copied to the CPU buffer before anything else is done:
        (group, page, page of the buffer).
    :param fetches: int32 [m, 3], pages copied back from it: (group, page of the buffer, page).
    :param copies: pages copied before they are written (copy-on-write), or that come home.
    :param new_pages: int32 [m, 4]: (handle, group, page position, logical page); numbers behind the
        pool's own are pages of other instances (:mod:`kvell.mempool.transports.neighbours`).
    :param work: decodes first, then prefill chunks in order of admission.
    :param checkpoints: int32 [m, 5], state pages written at cuts: (handle, group, tokens the
        state stands for, slice of the state, page).
    :param preempted: requests that lost their pages to this plan.
    :param parked: requests whose pages went to the CPU buffer and that now wait there.
    :param admitted: requests that run from this step on.
    :param slot: memory for the activations of ``work``; None where they have a reserve.
    :param pools: whether any of ``work`` may have a vector to give.
    :param streams: numbers of the transfers whose pages are pulled while ``work`` is computed: who
        pulls them is told how far it is.
    :param borrowed: pages of other instances that the step reads.  Rows whose right is gone when
        the step has read them are missed (:attr:`StepResult.missed`).
    :param away: (handle, tokens) of work whose first tokens are in no page of full attention here:
        their creditors are asked for attention over them.
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
        """Tokens computed in the step."""
        return sum(work.count for work in self.work)

    @property
    def is_idle(self) -> bool:
        """Whether the next plan would be the same, unless something happens."""
        return not (self.work or self.preempted or self.released)

    @cached_property
    def num_logits(self) -> int:
        """Number of logit rows that the step needs."""
        return sum(work.num_logits for work in self.work)

    def missed(self, stands: Callable[[BorrowedPages], bool] | None) -> tuple[int, ...]:
        """Return the requests for which pages were read in place that are others' by now, maybe.

        To be called when all is read: rights that still stand stood while it was.

        :param stands: whether pages may still be read; None: none may.
        """
        read = [one for one in self.borrowed if not one.by_queries]
        gone = {one.handle for one in read if stands is None or not stands(one)}
        return tuple(sorted(gone))

    def __eq__(self, other: object) -> bool:
        names = [item.name for item in fields(self)]
        return isinstance(other, StepPlan) and _same(self, other, names)

    def __hash__(self) -> int:
        return hash((self.step, self.work))


class TeamTime(Struct, frozen=True, gc=False):
    """What the threads of a step had, and lost to others on their processors.

    :param threads: that computed the step; of several models the most.
    :param is_shared: they went as beside others.
    :param thread_seconds: of all threads together.
    :param lost_seconds: of these, when a thread could have run and another program did.
    """

    threads: int
    is_shared: bool
    thread_seconds: float
    lost_seconds: float


class StepResult(Struct, frozen=True, gc=False):
    """The tokens a step sampled, in the order of its sampling work.

    :param token_ids: NO_TOKEN or NOT_NUMBERS where the request cannot go on.
    :param counts: tokens of each sampling work; empty if each has one.
    :param logprobs: of the token drawn for a handle, for requests that asked.
    :param scored: how likely the prompt's tokens behind those computed were, by handle; empty
        where logits are no numbers.
    :param missed: handles whose tokens do not count, since pages that they borrowed may have been
        read too late.
    :param pooled: vectors of prompts by handle, float32 as little-endian bytes; empty likewise.
    :param team: of compiled passes; None: there was none.
    """

    step: StepNumber
    token_ids: tuple[int, ...]
    counts: tuple[int, ...] = ()
    logprobs: Mapping[int, TokenLogprobs] = NONE_ASKED
    scored: Mapping[int, tuple[TokenLogprobs, ...]] = NONE_ASKED
    pooled: Mapping[int, bytes] = NONE_ASKED
    missed: tuple[int, ...] = ()
    team: TeamTime | None = None

    def by_work(self) -> list[tuple[int, ...]]:
        """The tokens of each sampling work.

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
