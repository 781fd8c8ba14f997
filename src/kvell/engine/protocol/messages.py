"""The instance protocol: all messages between a front and an instance.

Frozen records, encoded as msgpack between processes and passed as objects
inside one.  Commands go to the instance, events come back::

    front                                   instance
      │ ◄───────────── Ready ──────────────── │  schema version, credits
      │ ── Submit(request) ─────────────────► │  costs one credit
      │ ◄── PromptLogprobs(request, …) ────── │  if asked for: any number of times
      │ ◄── Tokens(request, first_index, …) ─ │  any number of times
      │ ── Cancel(request) ─────────────────► │  at any moment; idempotent
      │ ◄── Finished(request, reason) ─────── │  exactly once; gives the credit back
      │ ── AskStats ────────────────────────► │
      │ ◄── Stats ─────────────────────────── │
      │ ── AskPages, AskLargePage(number) ──► │
      │ ◄── Pages, LargePage ──────────────── │  for people who watch the pool
      │ ◄── Heartbeat ─────────────────────── │  after Ready, and then again and again
      │ ── Drain ───────────────────────────► │  finish what runs, accept nothing
      │ ◄── Drained ───────────────────────── │  then the instance ends

``Refused`` requests end with ``Finished(reason="refused", message=…)``.
"""

import dataclasses
from dataclasses import dataclass

from msgspec import Struct

from kvell.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from kvell.engine.protocol.pages import AskLargePage, AskPages, LargePage, Pages
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.tensors import SentTensor
from kvell.errors import ChangeSomething
from kvell.vocabulary import FinishReason, RequestId

SCHEMA_VERSION = 8

HEARTBEAT_SECONDS = 0.5
"""An instance sends a :class:`Heartbeat` this often."""


@dataclass(frozen=True)
class Submit:
    """Serve this prompt.

    ``prompt`` holds the token ids as little-endian int32 bytes, so that a long
    prompt costs one copy.  ``cache_salt`` names the prefix-cache root: requests
    with different salts never share pages.  ``attempt`` grows when the front
    submits the same request again after an instance died.

    ``images`` are (first token in the prompt, tokens there, image tokens), in order.  The
    tokens of an image in the prompt have negative ids, which identify its content.

    ``model`` is one of several that the instance serves; "" is the first.

    ``sampling.n`` is 1: a front submits each answer on its own
    (:meth:`SamplingParams.choices`).

    ``output`` holds the tokens that an earlier attempt emitted, as little-endian int32 bytes.
    The instance computes them like a prompt, emits what follows them, and counts them
    against ``max_tokens``: ``Tokens.first_index`` begins behind them.

    ``priority``: requests with lower ones are admitted before those that wait; 0 is usual.

    ``tensors`` are those of the model's processor for the images of this prompt, whose ids are
    then as the processor gave them; the instance fills in ``images`` itself.

    :raises ChangeSomething: if it asks for several answers, or the output is no whole tokens.
    """

    request_id: RequestId
    prompt: bytes
    sampling: SamplingParams
    cache_salt: str = ""
    attempt: int = 0
    images: tuple[tuple[int, int, int], ...] = ()
    model: str = ""
    output: bytes = b""
    tensors: tuple[SentTensor, ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        if len(self.output) % 4:
            size = f"{len(self.output)} bytes"
            raise ChangeSomething("output", size, "are no whole tokens", "send 4 bytes per token")
        if self.sampling.n != 1:
            raise ChangeSomething("n", self.sampling.n, "is not 1", "submit each answer on its own")


@dataclass(frozen=True)
class Cancel:
    """Stop a request and release what it holds; unknown ids are ignored."""

    request_id: RequestId


@dataclass(frozen=True)
class AskStats:
    """Send :class:`Stats` once.

    ``with_audit`` asks for ``Stats.problems`` too, which takes time in proportion to the pool.
    """

    with_audit: bool = False


@dataclass(frozen=True)
class Drain:
    """Finish all submitted requests, refuse later ones, then end."""


@dataclass(frozen=True)
class Ready:
    """First event of an instance: it can serve now.

    ``beside`` maps every further model's name to its ``max_model_len``, in order; ``memory``
    has the parts of the memory contract in bytes, and their sum, ``contract_bytes``.
    ``token_bytes`` is the most KV memory that a token takes.
    """

    schema_version: int
    incarnation: int
    credits: int
    model: str
    max_model_len: int
    kv_pool_bytes: int
    beside: dict[str, int] = dataclasses.field(default_factory=dict)
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    token_bytes: int = 0


class Tokens(Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """New output tokens of a request, in order.

    ``first_index`` is the output position of ``token_ids[0]``; a receiver drops
    positions it has already seen (re-runs after a restart repeat them).  ``logprobs`` has one
    entry for each token, if the request asked for them.
    """

    request_id: RequestId
    attempt: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The request is over and holds nothing any more.

    For a refusal, ``message`` is one clear line, ``field`` names what must be changed,
    and ``try_later`` says that nothing must be: there was just no room.  ``not_taken`` says that
    the instance takes no requests any more, so another may have this one.

    The seconds that it waited, prefilled and decoded in the instance are filled in by
    :class:`.stage_times.StageTimes`, which has a clock; comparisons ignore them.
    """

    request_id: RequestId
    attempt: int
    reason: FinishReason
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    message: str = ""
    field: str = ""
    try_later: bool = False
    not_taken: bool = False
    queue_seconds: float = dataclasses.field(default=0.0, compare=False)
    prefill_seconds: float = dataclasses.field(default=0.0, compare=False)
    decode_seconds: float = dataclasses.field(default=0.0, compare=False)


@dataclass(frozen=True)
class GroupStats:
    """Page counts of one layer group, in small pages; ``hit_tokens`` are those found in its cache.

    ``unwritten_pages`` and ``stranded_pages`` lie in large pages with a used page, see
    :class:`kvell.memory.PoolTotals`; ``most_pages`` is what the group would have if the whole
    pool were its own.
    """

    name: str
    used_pages: int
    cached_pages: int
    evicted_pages: int
    hit_tokens: int
    unwritten_pages: int = 0
    stranded_pages: int = 0
    checkpoint_pages: int = 0
    most_pages: int = 0
    page_tokens: int = 0
    page_bytes: int = 0


@dataclass(frozen=True)
class Stats:
    """Counters and gauges of one instance; counters never fall within an incarnation.

    ``steps_by_size`` counts steps by the buckets of
    :data:`~kvell.engine.requests.counting.STEP_TOKENS_BUCKETS`; ``step_tokens`` are the tokens
    they computed.
    ``memory`` has the chunks of a shared pool by owner and state, and how many moved; empty
    where KV cache and activations share none.  ``problems`` are the contradictions that the audit
    found; None if it was not asked for.  ``buffer`` has large pages and holders of the CPU
    buffer, and pages copied out and in; empty without one.
    """

    incarnation: int
    step: int
    running: int
    waiting: int
    large_pages: int
    empty_large_pages: int
    kv_cache_usage: float
    prompt_tokens: int
    output_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    finished: dict[str, int] = dataclasses.field(default_factory=dict)
    rungs: dict[str, int] = dataclasses.field(default_factory=dict)
    groups: tuple[GroupStats, ...] = ()
    protected_prefixes: int = 0
    protected_tokens: int = 0
    spec_decode_drafts: int = 0
    spec_decode_draft_tokens: int = 0
    spec_decode_accepted_tokens: int = 0
    spec_decode_accepted_by_position: tuple[int, ...] = ()
    step_tokens: int = 0
    steps_by_size: tuple[int, ...] = ()
    large_page_bytes: int = 0
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    buffer: dict[str, int] = dataclasses.field(default_factory=dict)
    problems: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Heartbeat:
    """The instance lives, and what it has at the end of its last step.

    Sent every ``HEARTBEAT_SECONDS``, also while a step computes.  ``free_bytes`` of KV memory
    are used by no running request: they are empty, or cached and can be evicted.
    """

    incarnation: int
    step: int
    running: int
    waiting: int
    large_pages: int
    empty_large_pages: int
    free_bytes: int
    pool_bytes: int


@dataclass(frozen=True)
class Drained:
    """All work is done; the last event of an instance."""


Command = Submit | Cancel | AskStats | AskPages | AskLargePage | Drain
Event = Ready | PromptLogprobs | Tokens | Finished | Stats | Pages | LargePage | Heartbeat | Drained
