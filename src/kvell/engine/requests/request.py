"""A request as the engine sees it.

::

    WAITING ──admit──► RUNNING ──last token──► FINISHED
       ▲                  │ │
       └────preempt───────┘ └──cancel──► FINISHED   (from WAITING too)
"""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import PENDING
from kvell.vocabulary import FinishReason, RequestId

NO_HANDLE = 0


class RequestState(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """Tokens, progress, and the handle of its pages while it runs.

    :ivar number: requests that came before it.
    :ivar model: which of several models computes it.
    :ivar computed: tokens that are computed, or are by a step in flight.
    :ivar settled: those of them whose step has its result.
    :ivar drawing: tokens that steps in flight draw, which nobody knows yet.
    :ivar repeats: right guesses that are computed again, since states do not go on over guesses.
    """

    request_id: RequestId
    attempt: int
    prompt: npt.NDArray[np.int32]
    sampling: SamplingParams
    max_tokens: int
    cache_root: str
    state: RequestState = RequestState.WAITING
    output: list[int] = field(default_factory=list)
    computed: int = 0
    settled: int = 0
    drawing: int = 0
    repeats: int = 0
    handle: int = NO_HANDLE
    cached_tokens: int | None = None
    preemptions: int = 0
    prefix_wait_steps: int = 0
    runs_alone: bool = False
    finish_reason: FinishReason | None = None
    images: npt.NDArray[np.int32] | None = None
    image_rows: tuple[tuple[int, int, int], ...] = ()
    embedded: int = 0
    model: str = ""
    number: int = 0
    _history: bytearray = field(default_factory=bytearray)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, with those that steps in flight draw."""
        return len(self.prompt) + len(self.output) + self.drawing

    @property
    def num_output(self) -> int:
        """Output tokens, with those that steps in flight draw."""
        return len(self.output) + self.drawing

    @property
    def newest_token(self) -> int:
        """The last of a request that decodes; PENDING if a step in flight draws it."""
        return PENDING if self.drawing else self.output[-1]

    @property
    def wants_work(self) -> bool:
        """Is there anything to compute that no step in flight computes?"""
        return self.finish_reason is None and self.num_output < self.max_tokens

    @property
    def remaining(self) -> int:
        """Tokens to compute; while decoding the newest, and those it repeats."""
        return len(self.prompt) + len(self.output) + self.drawing - self.computed

    @property
    def is_decoding(self) -> bool:
        """Is only the newest token left to compute for the first time, and was it sampled?"""
        made = len(self.output) + self.drawing
        return made > 0 and len(self.prompt) + made - self.computed == 1 + self.repeats

    def begin(self, until: int, draws: bool) -> None:
        """A step is planned that computes the tokens before ``until``, and may draw the next."""
        self.computed = until
        self.drawing += draws

    def settle(self, until: int, draws: bool) -> None:
        """That step has its result; right guesses were computed beside its tokens."""
        self.settled = until
        self.computed = max(self.computed, until)
        self.drawing -= draws

    @cached_property
    def image_ids(self) -> tuple[int, ...]:
        """What stands for its images at their ends in the prompt."""
        return tuple(int(self.prompt[start + tokens - 1]) for start, tokens, _ in self.image_rows)

    def history(self) -> bytearray:
        """All tokens as little-endian int32, to search in; grows with every call, is not copied."""
        known = len(self._history) // 4
        self._history += self.tokens(known, self.num_tokens).astype("<i4").tobytes()
        return self._history

    def tokens(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Tokens start … end-1, int32, across prompt and output; PENDING for those being drawn."""
        size = len(self.prompt)
        if end <= size:
            return self.prompt[start:end]
        tail = np.asarray(self.output[max(0, start - size) : end - size], np.int32)
        if self.drawing:
            pending = min(end, self.num_tokens) - max(start, size + len(self.output))
            tail = np.append(tail, np.full(max(0, pending), PENDING, np.int32))
        return tail if start >= size else np.concatenate([self.prompt[start:], tail])
