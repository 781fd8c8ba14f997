"""The instance protocol: all messages between a front and an instance.

Messages are frozen records: msgpack between processes, objects inside one process.  A front
sends commands, an instance sends events::

    front                                   instance
      │ ◄───────────── Ready ──────────────── │  schema version, facts of the instance
      │ ── Submit(request) ─────────────────► │  costs one credit
      │ ◄── Acknowledgement(request) ──────── │  it is valid, and waits or runs
      │ ◄── PromptLogprobs(request, …) ────── │  if asked for: any number of times
      │ ◄── Tokens(request, first_index, …) ─ │  any number of times
      │ ── Cancel(request) ─────────────────► │  at any time; idempotent
      │ ◄── Finished(request, reason) ─────── │  exactly once; gives the credit back
      │ ── Migrate(request, goes_to) ───────► │  move it to another instance: Finished("moved")
      │ ◄── MigrationRefused(request) ─────── │  the request stays on this instance
      │ ── Introduce(addresses) ────────────► │  addresses of the others, on several hosts
      │ ── AskStats ────────────────────────► │
      │ ◄── Stats ─────────────────────────── │
      │ ── ResetPrefixCache ────────────────► │  evict all that no request uses
      │ ── AskPages, AskLargePage(number) ──► │
      │ ◄── Pages, LargePage ──────────────── │  for people who watch the pool
      │ ── WatchIndex ──────────────────────► │
      │ ◄── IndexNotice ───────────────────── │  whenever prefixes are cached or evicted
      │ ◄── Heartbeat ─────────────────────── │  after Ready, then periodically
      │ ── KeepAlive ───────────────────────► │  the front's heartbeat, if there are several
      │ ── Lead(epoch) ─► ◄─ Led(epoch) ───── │  a manager takes over from lower epochs
      │ ── Drain ───────────────────────────► │  finish all requests, accept none
      │ ◄── Drained ───────────────────────── │  then the instance exits

Refused requests end with ``Finished(reason="refused", message=…)``.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import Struct

from kvell.engine.protocol.logprobs import PromptLogprobs, TokenLogprobs
from kvell.engine.protocol.notices import IndexNotice, WatchIndex
from kvell.engine.protocol.pages import AskLargePage, AskPages, LargePage, Pages
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.request_spec import TOKEN_BYTES, RequestSpec, no_whole_tokens
from kvell.engine.protocol.statistics import InstanceFacts, LoadStats, Stats
from kvell.errors import Bound, ChangeSomething, TryLater
from kvell.vocabulary import FinishReason, RequestId


@dataclass(frozen=True)
class Lead:
    """The command by which a manager takes the instance; :class:`Led` answers it.

    :param epoch: the manager's; commands with a lower epoch are refused from now on.
    """

    epoch: int


@dataclass(frozen=True)
class Led:
    """The answer to a manager's command.

    :param epoch: the command's epoch if it is obeyed; else the higher epoch of another manager.
    """

    epoch: int


@dataclass(frozen=True)
class Drained:
    """The last event of an instance: all requests have ended."""


@dataclass(frozen=True)
class Introduce:
    """The addresses of all instances that serve now; they replace earlier addresses.

    :param addresses: ``tcp://host:port`` by the instance's name.
    :param epoch: epoch of the manager that sends it; 0 without a manager.
    """

    addresses: dict[str, str] = field(default_factory=dict)
    epoch: int = 0


SCHEMA_VERSION = 28
StepBlame = Literal["", "suspect", "blameless"]

HEARTBEAT_SECONDS = 0.5
"""The interval of an instance's :class:`Heartbeat`."""
KEEP_ALIVE_SECONDS = 1.0
"""The interval of a front's :class:`KeepAlive` to an instance that may have other fronts."""
FRONT_LEASE_SECONDS = 10.0
"""After this silence of a front, an instance cancels the front's requests."""
CREDITS = 1024
"""The most unfinished requests of a front."""


@dataclass(frozen=True)
class Submit:
    """The command to serve a request: one attempt.

    ``attempt`` grows when the front submits the same request again after an instance died.

    ``output`` holds the tokens that an earlier attempt emitted, as little-endian int32 bytes.
    The instance computes them like a prompt, emits only further tokens, and counts them against
    ``max_tokens``: ``Tokens.first_index`` begins after them.

    ``goes_to`` names the instance that continues the request after its prefill, if it can.

    ``pulls_from`` names an instance that may have cached more of the prompt than this one, which
    then first requests these pages.

    ``is_suspect`` says that an earlier attempt ended with a failed step or instance: if a step
    fails before this attempt's first token, this request is to blame.

    ``placement`` distributes a KV cache that exceeds the instance's memory: a part here, and
    sections at other instances.  It excludes ``goes_to`` and ``pulls_from``.

    :raises ChangeSomething: if fields contradict each other, or the output is not a whole number of
        tokens.
    """

    spec: RequestSpec
    attempt: int = 0
    output: bytes = b""
    goes_to: str = ""
    pulls_from: str = ""
    is_suspect: bool = False
    placement: tuple[RequestPlacementEntry, ...] = ()

    def __post_init__(self) -> None:
        if self.placement and (self.goes_to or self.pulls_from):
            problem = "is only for a request that stays on its instance"
            raise ChangeSomething("placement", "…", problem, "leave out goes_to and pulls_from")
        if len(self.output) % TOKEN_BYTES:
            raise no_whole_tokens("output", self.output)
        if self.spec.pooling and self.output:
            raise ChangeSomething("output", "…", "cannot follow a pooled prompt", "leave it out")

    @property
    def request_id(self) -> RequestId:
        return self.spec.request_id


@dataclass(frozen=True)
class Cancel:
    """The command to stop a request and free its memory; unknown ids are ignored.

    ``attempt``: attempts after this number continue; negative stops any.
    """

    request_id: RequestId
    attempt: int = -1

    def spares(self, attempt: int) -> bool:
        return 0 <= self.attempt < attempt


@dataclass(frozen=True)
class Migrate:
    """The command to move a running request to another instance.

    It ends here with ``Finished("moved")``, or continues here after :class:`MigrationRefused`.
    """

    request_id: RequestId
    attempt: int
    goes_to: str


@dataclass(frozen=True)
class MoveKvCache:
    """The command to move the next sections of a running request to another instance's memory.

    The paper's ``move_kvcache(req_id, num_blocks, dst_inst)`` (Infinite-LLM §6.2, Listing 1).  The
    creditor may refuse each section (``try_move_kvcache``), which then stays.

    :param num_blocks: number of sections of ``SECTION_TOKENS`` tokens, after those already moved.
    :param dst: the creditor.
    """

    request_id: RequestId
    attempt: int
    num_blocks: int
    dst: str


@dataclass(frozen=True)
class AskStats:
    """The command to send :class:`Stats` once.

    ``with_audit`` asks for ``Stats.problems`` too, which takes time in proportion to the pool.
    """

    with_audit: bool = False


@dataclass(frozen=True)
class KeepAlive:
    """The heartbeat of a front, whose lease expires after ``FRONT_LEASE_SECONDS`` of silence."""


@dataclass(frozen=True)
class ResetPrefixCache:
    """The command to evict all cached prefixes that no request uses, also in the CPU buffer."""


@dataclass(frozen=True)
class Drain:
    """The command to finish all requests, refuse new ones and exit; ``epoch`` as in Introduce."""

    epoch: int = 0


@dataclass(frozen=True)
class Ready:
    """The first event of an instance, which can serve now.

    :param schema_version: version of the protocol between front and instance.
    """

    schema_version: int
    facts: InstanceFacts


@dataclass(frozen=True)
class Acknowledgement:
    """A request is valid, its grammar is compiled, and it waits for its first step."""

    request_id: RequestId
    attempt: int


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


NotTaken = Literal["", "draining", "full", "rival"]


@dataclass(frozen=True)
class Finished:
    """The end of a request, which holds no memory any more.

    For a refusal, ``message`` is one line, ``field`` names the field to change, and ``try_later``
    says that there was no room: no change is needed.  An error has a ``field``
    too if the client must change it.  ``not_taken`` says that another instance may
    take the request: this one is draining, or its credits are in use, some by requests that
    the front does not know yet, or it gave way to a rival that borrows the same memory.  ``bound``
    is the bound that a refused request exceeded.

    ``step_failed`` says that the request's step failed; the instance continues, and the request
    may be tried again.  It is a ``suspect``, or ``blameless`` because the step had another request
    that was already suspect (``Submit.is_suspect``).

    ``cached_tokens`` of the prompt were cached at admission.  ``cache_write_tokens`` follow them,
    and are cached now for a repeat of the prompt.

    ``pulled_bytes`` of cached pages were copied from another instance for the request, and
    ``moved_bytes`` to the instance that continues it.

    ``embedding`` is the prompt's vector as little-endian float32 bytes, for a pooling request.

    :class:`.stage_times.StageTimes`, which has a clock, fills in the seconds that the request
    waited, prefilled and decoded in the instance; comparisons ignore them.
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
    pulled_bytes: int = 0
    moved_bytes: int = 0
    queue_seconds: float = dataclasses.field(default=0.0, compare=False)
    prefill_seconds: float = dataclasses.field(default=0.0, compare=False)
    decode_seconds: float = dataclasses.field(default=0.0, compare=False)


def refusal(command: "Submit", problem: ChangeSomething | TryLater) -> Finished:
    """Return the end of a request that is refused for a problem."""
    return Finished(
        command.request_id,
        command.attempt,
        "refused",
        command.spec.prompt_tokens,
        message=str(problem),
        field="" if isinstance(problem, TryLater) else problem.field,
        try_later=isinstance(problem, TryLater),
        bound=problem.bound,
    )


@dataclass(frozen=True)
class MigrationRefused:
    """The answer to a move that failed: the request stays, as it cannot move or finds no room."""

    request_id: RequestId
    attempt: int


class OtherFronts(NamedTuple):
    """The load of an instance from all fronts but the receiver.

    :param prompt_tokens: prompt tokens of their requests without an answer yet.
    :param requests: number of their requests.
    """

    prompt_tokens: int
    requests: int


NO_OTHERS = OtherFronts(0, 0)


@dataclass(frozen=True)
class Heartbeat:
    """The heartbeat of an instance: every ``HEARTBEAT_SECONDS``, also while a step computes."""

    load: LoadStats
    others: OtherFronts = NO_OTHERS


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
    | Acknowledgement
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
