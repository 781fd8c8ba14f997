"""A request as the engine sees it.

::

    WAITING ──admit──► RUNNING ──last token──► FINISHED
       ▲                  │ │
       └────preempt───────┘ └──cancel──► FINISHED   (from WAITING too)

A request is MOVING while another instance pulls its pages; meanwhile it runs in no step.  It is
OFFLOADED while its prompt is computed into the CPU buffer.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.messages import StepBlame
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.cache_roots import LONG, long_root
from kvell.engine.requests.plan import PENDING
from kvell.engine.requests.turns import Turn
from kvell.vocabulary import FinishReason, RequestId

NO_HANDLE = 0


class RequestState(StrEnum):
    """The state of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    MOVING = "moving"
    OFFLOADED = "offloaded"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """The tokens, progress and, while it runs, the page handle of a request.

    :ivar spec: what its caller asked for, with a seed and the name of its model filled in.
    :ivar number: number of requests submitted before it.
    :ivar computed: number of tokens that are computed, or will be by steps in flight.
    :ivar settled: number of those whose step has a result.
    :ivar drawing: number of pending tokens, which steps in flight draw.
    :ivar scored: position in the prompt up to which logprobs are reported.
    :ivar embedding: its vector, float32 as little-endian bytes.
    :ivar problem: the reason of its end, if that is an error.
    :ivar problem_field: the field that the client must change, if that is the reason.
    :ivar is_spoiled: whether its computed tokens may be wrong, so that they are not cached.
    :ivar step_failed: whether it is a suspect, if it ended with a failed step.
    :ivar suspect_at: number of output tokens that it had when it was submitted as a suspect;
        negative if it was none.
    :ivar returns_to: the instance that gets its text when it has ended; "" for none.
    :ivar local_tokens: largest number of its newest tokens with pages here, if it is longer than
        this instance's memory; 0: all of them.
    :ivar found_tokens: number of its first tokens that were cached here at its admission.
    :ivar remote_tokens: number of its first tokens whose pages are at other instances; without
        pages here, it continues after these tokens.
    :ivar entered_tokens: tokens that it had to compute at its last admission before it could make
        the next one; ``entered_output``: its output tokens then.
    :ivar short_rope_tokens: the longest text under its model's short rotation table; 0: its model
        has one table.
    :ivar group_hits: number of cached tokens that it took in each group when it was first admitted.
    :ivar pulled_bytes: pages of its prompt that were copied from another instance; ``moved_bytes``
        were copied to the instance that continues it.
    :ivar repeats: accepted draft tokens to compute again, since states do not advance over drafts.
    """

    spec: RequestSpec
    attempt: int
    max_tokens: int
    cache_root: str
    state: RequestState = RequestState.WAITING
    output: list[int] = field(default_factory=list)
    computed: int = 0
    settled: int = 0
    drawing: int = 0
    scored: int = 0
    repeats: int = 0
    handle: int = NO_HANDLE
    cached_tokens: int | None = None
    preemptions: int = 0
    prefix_wait_steps: int = 0
    runs_alone: bool = False
    finish_reason: FinishReason | None = None
    embedded: int = 0
    number: int = 0
    embedding: bytes = b""
    returns_to: str = ""
    local_tokens: int = 0
    found_tokens: int = 0
    remote_tokens: int = 0
    entered_tokens: int = 0
    entered_output: int = 0
    short_rope_tokens: int = 0
    group_hits: tuple[int, ...] = ()
    pulled_bytes: int = 0
    moved_bytes: int = 0
    problem: str = ""
    problem_field: str = ""
    is_spoiled: bool = False
    step_failed: StepBlame = ""
    suspect_at: int = -1
    _history: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        # Steps read these parts of the spec often, so they have names of their own.
        self.request_id: RequestId = self.spec.request_id
        self.prompt = self.spec.token_ids
        self.sampling: SamplingParams = self.spec.sampling
        self.model = self.spec.model

    @cached_property
    def turn(self) -> Turn:
        return Turn.of(self.spec)

    @cached_property
    def images(self) -> npt.NDArray[np.int32] | None:
        """The images of the prompt, int32 ``[images, 3]``; None without images."""
        return np.asarray(self.spec.images, np.int32) if self.spec.images else None

    @property
    def is_published(self) -> bool:
        """Whether its computed tokens are cached for later prompts."""
        return not self.is_spoiled and self.state is not RequestState.OFFLOADED

    @property
    def is_suspect(self) -> bool:
        return len(self.output) == self.suspect_at

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output) + self.drawing

    @property
    def uses_long_rope(self) -> bool:
        return self.cache_root.startswith(LONG)

    @property
    def outgrows_table(self) -> bool:
        """Whether all keys must be recomputed under the long table before the next token."""
        return 0 < self.short_rope_tokens < self.num_tokens and not self.uses_long_rope

    def choose_table(self) -> None:
        if self.outgrows_table:
            self.cache_root = long_root(self.cache_root)

    @property
    def may_outgrow_table(self) -> bool:
        return self.short_rope_tokens > 0 and not self.uses_long_rope

    @property
    def local_reason(self) -> str:
        """The reason why all pages stay here for now; "" if sections may be remote."""
        beyond = f"its rotary frequencies change beyond {self.short_rope_tokens} tokens"
        return beyond if self.may_outgrow_table else ""

    @property
    def num_output(self) -> int:
        """Number of output tokens, pending ones included."""
        return len(self.output) + self.drawing

    @property
    def wants_work(self) -> bool:
        return self.finish_reason is None and self.num_output < self.max_tokens

    @property
    def remaining(self) -> int:
        """Number of tokens left to compute; while decoding, the newest and those to repeat."""
        return len(self.prompt) + len(self.output) + self.drawing - self.computed

    @property
    def end_for_now(self) -> int:
        """Number of tokens that may be computed for now; more once further sections are remote."""
        return min(self.num_tokens, self._window_end) if self.local_tokens else self.num_tokens

    @property
    def _window_end(self) -> int:
        """End of the tokens that may be local for now, at least one after the cached ones."""
        return max(self.remote_tokens + self.local_tokens, self.found_tokens + 1)

    @property
    def is_held_up(self) -> bool:
        """Whether the request is blocked until further sections are remote."""
        return self.local_tokens > 0 and self.computed >= self._window_end

    @property
    def borrows(self) -> bool:
        """Whether the request has remote sections, or is blocked until it has more."""
        return self.remote_tokens > 0 or self.is_held_up

    @property
    def is_decoding(self) -> bool:
        """Whether all tokens but the newest, sampled one have been computed once."""
        made = len(self.output) + self.drawing
        return made > 0 and len(self.prompt) + made - self.computed == 1 + self.repeats

    def begin(self, until: int, draws: bool) -> None:
        """Record a planned step that computes the tokens before ``until``, maybe draws the next."""
        self.computed = until
        self.drawing += draws

    def settle(self, until: int, draws: bool) -> None:
        """Record that step's result; ``until`` includes accepted draft tokens."""
        self.settled = until
        self.computed = max(self.computed, until)
        self.drawing -= draws

    def history(self) -> bytearray:
        """Return all tokens as little-endian int32, in one buffer that is extended at each call."""
        length = len(self._history) // 4
        self._history += self.tokens(length, self.num_tokens).astype("<i4").tobytes()
        return self._history

    @property
    def is_scored(self) -> bool:
        return self.sampling.prompt_logprobs is not None

    def past(self, end: int) -> npt.NDArray[np.int32]:
        """Return the tokens before ``end``, int32; at least the whole prompt if it is scored."""
        return self.tokens(0, max(end, len(self.prompt)) if self.is_scored else end)

    def tokens(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Return tokens start … end-1 of prompt and output, int32; PENDING for those in flight."""
        size = len(self.prompt)
        if end <= size:
            return self.prompt[start:end]
        tail = np.asarray(self.output[max(0, start - size) : end - size], np.int32)
        if self.drawing:
            pending = min(end, self.num_tokens) - max(start, size + len(self.output))
            tail = np.append(tail, np.full(max(0, pending), PENDING, np.int32))
        return tail if start >= size else np.concatenate([self.prompt[start:], tail])
