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
      │ ── Migrate(request, goes_to) ───────► │  it may go on elsewhere: then Finished("moved")
      │ ◄── MigrationRefused(request) ─────── │  a request that was to move does not
      │ ── Introduce(addresses) ────────────► │  where the others listen, on several hosts
      │ ── AskStats ────────────────────────► │
      │ ◄── Stats ─────────────────────────── │
      │ ── ResetPrefixCache ────────────────► │  it evicts what no request uses
      │ ── AskPages, AskLargePage(number) ──► │
      │ ◄── Pages, LargePage ──────────────── │  for people who watch the pool
      │ ── WatchIndex ──────────────────────► │
      │ ◄── IndexNotice ───────────────────── │  whenever prefixes are cached or evicted
      │ ◄── Heartbeat ─────────────────────── │  after Ready, and then again and again
      │ ── KeepAlive ───────────────────────► │  the same the other way, where fronts are several
      │ ── Lead(epoch) ─► ◄─ Led(epoch) ───── │  of a manager: an older one is obeyed no more
      │ ── Drain ───────────────────────────► │  finish what runs, accept nothing
      │ ◄── Drained ───────────────────────── │  then the instance ends

``Refused`` requests end with ``Finished(reason="refused", message=…)``.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from kvell.engine.protocol.leading import Drained, Introduce, Lead, Led
from kvell.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from kvell.engine.protocol.notices import IndexedGroup, IndexNotice, WatchIndex
from kvell.engine.protocol.pages import AskLargePage, AskPages, LargePage, Pages
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.pooling import Pooling
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.statistics import Stats
from kvell.engine.protocol.tensors import SentTensor
from kvell.errors import Bound, ChangeSomething
from kvell.vocabulary import FinishReason, RequestId

SCHEMA_VERSION = 21
StepBlame = Literal["", "suspect", "blameless"]

HEARTBEAT_SECONDS = 0.5
"""An instance sends a :class:`Heartbeat` this often."""
KEEP_ALIVE_SECONDS = 1.0
"""A front sends a :class:`KeepAlive` this often to an instance that others may have too."""
FRONT_LEASE_SECONDS = 10.0
"""What a front has there is cancelled when it is silent for so long."""
MOST_LONGEST = 4
"""Requests that a heartbeat names as the longest, at most."""
CREDITS = 1024
"""Most unfinished requests of a front."""


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

    ``priority``: requests with lower ones are admitted before those that wait; 0 is usual.  Of
    equal priority, tenants take turns, and so do the groups of a ``tenant``; those of a ``group``
    were asked for together.

    ``goes_to`` names the instance that goes on with it once its prompt is computed, if it can.

    ``pulls_from`` names an instance that may have more of its prompt than this one: it is asked
    for that first.

    ``is_suspect`` says that an earlier attempt ended with a failed step or instance: if a step
    fails before this one's first token, it is to blame.

    ``tensors`` are those of the model's processor for the images of this prompt, whose ids are
    then as the processor gave them; the instance fills in ``images`` itself.

    ``placement`` says where its KV cache is to lie if that is longer than the instance's memory:
    here, and in sections at others.  It then goes nowhere else, and asks nobody for its prompt.

    ``pooling`` asks for the prompt's vector in place of tokens: it comes with ``Finished``, and
    ``sampling`` does not matter.

    :raises ChangeSomething: if it asks for several answers, or prompt or output have half a token.
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
    pooling: Pooling = ""
    goes_to: str = ""
    pulls_from: str = ""
    tenant: str = ""
    group: str = ""
    is_suspect: bool = False
    placement: tuple[RequestPlacementEntry, ...] = ()

    def __post_init__(self) -> None:
        if self.placement and (self.goes_to or self.pulls_from):
            problem = "is for a request that stays where it is computed"
            raise ChangeSomething("placement", "…", problem, "leave out goes_to and pulls_from")
        for name, tokens in (("prompt", self.prompt), ("output", self.output)):
            if len(tokens) % 4:
                size = f"{len(tokens)} bytes"
                raise ChangeSomething(name, size, "are no whole tokens", "send 4 bytes per token")
        if self.sampling.n != 1:
            raise ChangeSomething("n", self.sampling.n, "is not 1", "submit each answer on its own")
        if self.pooling and self.output:
            raise ChangeSomething("output", "…", "cannot follow a pooled prompt", "leave it out")


@dataclass(frozen=True)
class Cancel:
    """Stop a request and release what it holds; unknown ids are ignored.

    ``attempt``: later attempts than this one go on; negative for any.
    """

    request_id: RequestId
    attempt: int = -1

    def spares(self, attempt: int) -> bool:
        """Whether an attempt goes on all the same."""
        return 0 <= self.attempt < attempt


@dataclass(frozen=True)
class Migrate:
    """Let another instance go on with a request, in the middle of its answer.

    It ends here with ``Finished("moved")``, or goes on here after :class:`MigrationRefused`.
    """

    request_id: RequestId
    attempt: int
    goes_to: str


@dataclass(frozen=True)
class MoveKvCache:
    """Let the next sections of a running request lie in another instance's memory.

    The paper's ``move_kvcache(req_id, num_blocks, dst_inst)`` (Infinite-LLM §6.2, Listing 1).  The
    creditor may refuse each of them (``try_move_kvcache``); then they stay.

    :param num_blocks: sections of ``SECTION_TOKENS`` tokens, behind those that are away already.
    :param dst: the creditor.
    """

    request_id: RequestId
    attempt: int
    num_blocks: int
    dst: str


@dataclass(frozen=True)
class AskStats:
    """Send :class:`Stats` once.

    ``with_audit`` asks for ``Stats.problems`` too, which takes time in proportion to the pool.
    """

    with_audit: bool = False


@dataclass(frozen=True)
class KeepAlive:
    """The front lives; what one has that is silent for ``FRONT_LEASE_SECONDS`` is cancelled."""


@dataclass(frozen=True)
class ResetPrefixCache:
    """Evict all cached prefixes, in the CPU buffer too; pages that requests use stay."""


@dataclass(frozen=True)
class Drain:
    """Finish all submitted requests, refuse later ones, then end; ``epoch`` as of Introduce."""

    epoch: int = 0


@dataclass(frozen=True)
class Ready:
    """First event of an instance: it can serve now.

    :param schema_version: of the protocol between front and instance.
    :param incarnation: tells this start of the instance from its other starts.
    :param credits: requests that it may have at once.
    :param model: name of the first model.
    :param max_model_len: most tokens of a request to the first model.
    :param kv_pool_bytes: most bytes of KV cache.
    :param beside: ``max_model_len`` of every further model by its name, in order.
    :param memory: parts of the memory contract in bytes, and their sum, ``contract_bytes``.
    :param token_bytes: most KV memory that a token takes.
    :param indexed: what the blocks of each layer group are that :class:`.IndexNotice` tells of.
    :param pool_address: where other instances reach its pool, on several hosts; "" on one.
    :param staying: the setting that keeps its requests from moving to others; "" if they can.
    :param section_bytes: KV memory of a section that another instance may lend it; 0:
        it borrows nothing.
    :param reach_tokens: most tokens of a request to the first model, if others lend as much as it
        takes.
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
    indexed: tuple[IndexedGroup, ...] = ()
    pool_address: str = ""
    staying: str = ""
    section_bytes: int = 0
    reach_tokens: int = 0

    @property
    def longest_tokens(self) -> int:
        """Most tokens that a request to the first model could ever have."""
        return max(self.max_model_len, self.reach_tokens if self.section_bytes else 0)


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


NotTaken = Literal["", "draining", "full"]


@dataclass(frozen=True)
class Finished:
    """The request is over and holds nothing any more.

    For a refusal, ``message`` is one clear line, ``field`` names what must be changed,
    and ``try_later`` says that nothing must be: there was just no room.  ``not_taken`` says that
    another may have this one, as the instance takes none any more, or just now no more: its
    credits are in use, some by requests that their front does not know of yet.  ``bound`` is the
    bound that the request exceeded, if that is why it was refused.

    ``step_failed`` says that the step which was to compute it failed; the instance lives on, and
    the request may be tried again.  It is a ``suspect``, or ``blameless`` since there was one
    beside it that came as such (``Submit.is_suspect``).

    ``cached_tokens`` of the prompt were cached when it was let in; ``cache_write_tokens`` are those
    behind them that a repeat of the prompt would find besides, now that the request is over.

    ``embedding`` is the prompt's vector where that was asked for, as little-endian float32 bytes.

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
    not_taken: NotTaken = ""
    embedding: bytes = b""
    bound: Bound | None = None
    step_failed: StepBlame = ""
    cache_write_tokens: int = 0
    queue_seconds: float = dataclasses.field(default=0.0, compare=False)
    prefill_seconds: float = dataclasses.field(default=0.0, compare=False)
    decode_seconds: float = dataclasses.field(default=0.0, compare=False)


@dataclass(frozen=True)
class MigrationRefused:
    """A request that was to go on elsewhere stays: it cannot move, or there is no room."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True)
class Heartbeat:
    """The instance lives, and what it has at the end of its last step.

    Sent every ``HEARTBEAT_SECONDS``, also while a step computes.

    :param incarnation: tells this start of the instance from its other starts.
    :param step: steps so far.
    :param running: requests in the running batch.
    :param waiting: requests that wait in the instance.
    :param large_pages: large pages of the pool.
    :param empty_large_pages: large pages that nobody uses and that cache nothing.
    :param free_bytes: KV memory that no running request uses: empty, or cached and evictable.
    :param pool_bytes: size of the KV pool.
    :param others_prompt_tokens: of requests of other fronts, prompt tokens without an answer yet.
    :param others_requests: requests of other fronts.
    :param placements: where the KV cache lies of requests that borrow memory; all of them, so that
        who hears it for the first time knows as much as others.
    :param held_tokens: that a step of the running requests reads.
    :param waiting_tokens: prompts of the requests that wait, and what they have emitted.
    :param longest: of the running requests at most ``MOST_LONGEST``: those with most sections here
        that others could have, and how many of each.
    """

    incarnation: int
    step: int
    running: int
    waiting: int
    large_pages: int
    empty_large_pages: int
    free_bytes: int
    pool_bytes: int
    others_prompt_tokens: int = 0
    others_requests: int = 0
    placements: tuple[RequestPlacementEntry, ...] = ()
    held_tokens: int = 0
    waiting_tokens: int = 0
    longest: tuple[RequestPlacementEntry, ...] = ()


Command = (
    Submit
    | Cancel
    | Migrate
    | MoveKvCache
    | Introduce
    | Lead
    | AskStats
    | ResetPrefixCache
    | AskPages
    | AskLargePage
    | WatchIndex
    | KeepAlive
    | Drain
)
Event = (
    Ready
    | PromptLogprobs
    | Tokens
    | Finished
    | MigrationRefused
    | Stats
    | Pages
    | LargePage
    | IndexNotice
    | Heartbeat
    | Led
    | Drained
)
