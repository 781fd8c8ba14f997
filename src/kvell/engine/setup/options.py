"""Settings of an engine over a model that is loaded, and how a setting is given as a flag.

Command-line flags, arguments of :class:`kvell.LLM` and :class:`kvell.AsyncEngine`, and the
command lines of instances are all made of these fields: a new setting is one field.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvell.engine.requests.limits import max_step_draft_tokens
from kvell.memory import Embeddings, Manager
from kvell.mempool.rendezvous import Rendezvous
from kvell.pages.sizing import MANAGERS

Kind = Literal["text", "bytes", "seconds", "length", "count", "at-least-one", "switch"]
"""How a flag's value is written: ``length`` is a number of tokens, or ``auto`` for None."""


@dataclass(frozen=True)
class Flag:
    """How a setting is given on a command line.

    :ivar help: one line; it says what None means.
    :ivar choices: all values, where they are few.
    """

    name: str
    kind: Kind
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()


def setting(
    default: object,
    flag: str,
    help: str,  # noqa: A002 - click's word
    kind: Kind = "text",
    metavar: str = "",
    choices: Sequence[str] = (),
) -> Any:
    """A field of settings that has a flag (:class:`Flag`)."""
    metadata = {"flag": Flag(flag, kind, help, metavar, tuple(choices))}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings of an engine over a model that is loaded."""

    memory_bytes: int | None = setting(
        None,
        "--memory",
        "Memory of weights, KV cache and activations together; the last two share what is left.",
        "bytes",
    )
    """Of weights, KV cache and activations together. With a fused pass, KV cache and activations
    share what the weights leave, and each takes what the other does not need; otherwise a part of
    it is reserved for activations. None bounds the KV cache alone."""
    kv_memory_bytes: int | None = setting(
        None,
        "--kv-memory",
        "Memory of the KV pool, like 512MiB or 24GB. [default: a quarter of what is free]",
        "bytes",
    )
    """Size of the KV pool; with ``memory_bytes``, the KV's initial share."""
    cpu_buffer_bytes: int | None = setting(
        None,
        "--cpu-buffer",
        "Host memory for pages of preempted requests, which resume later. [default: none]",
        "bytes",
    )
    """Additional host memory in which preempted requests keep their pages if that is quicker than
    recomputing their tokens, and cached prefixes; None for no buffer."""
    slo_ttft_seconds: float | None = setting(
        None,
        "--slo-ttft",
        "Time limit to a first token: while these are late, prompts go ahead of decodes, whose "
        "pages wait in the CPU buffer.",
        "seconds",
    )
    """Limit to a request's first token. With either objective, prompts go ahead of decodes, whose
    pages wait in the CPU buffer: they use more of it while first tokens are late, less while
    answers are slow. None sets no limit."""
    slo_tpot_seconds: float | None = setting(
        None,
        "--slo-tpot",
        "Time limit per further token: while it is missed, prompts do not go ahead.",
        "seconds",
    )
    """Limit for each further token of an answer, on average."""
    max_model_len: int | None = setting(
        None, "--max-model-len", "Prompt and output tokens of one request at most.", "length"
    )
    """Most tokens of a request, prompt and answer together. None takes the longest request that the
    model and the pool allow."""
    max_num_batched_tokens: int = setting(
        2048, "--max-num-batched-tokens", "Tokens of one step at most.", "at-least-one"
    )
    """Most tokens that a step computes, of all requests together."""
    max_num_seqs: int = setting(
        256, "--max-num-seqs", "Requests that run at once at most.", "at-least-one"
    )
    """Most requests that run at once."""
    enable_chunked_prefill: bool = setting(
        True,
        "--enable-chunked-prefill",
        "Cut prompts into chunks, computed beside decodes; else decodes wait for whole prompts.",
        "switch",
    )
    """Cut prompts into chunks that share steps with decodes. Else a step computes whole prompts or
    decodes, prompts first; then
    ``max_num_batched_tokens`` must be at least ``max_model_len``, and is its limit if that is
    None."""
    num_speculative_tokens: int = setting(
        0,
        "--num-speculative-tokens",
        "Draft tokens of a request per step, at most; answers stay the same.",
        "count",
    )
    """Draft tokens of a request per step, at most. Answers stay the same."""
    prompt_lookup_max: int = setting(
        5,
        "--prompt-lookup-max",
        "Longest end of the text to look up for draft tokens.",
        "at-least-one",
    )
    """Most tokens that are looked up for draft tokens."""
    prompt_lookup_min: int = setting(
        2, "--prompt-lookup-min", "Shortest end of the text to look up.", "at-least-one"
    )
    """Fewest tokens that are looked up for draft tokens."""
    async_scheduling: bool = setting(
        False,
        "--async-scheduling",
        "Plan a step while the one before runs, where the model allows it.",
        "switch",
    )
    """Plan a step while the previous one runs, if the model allows it; answers stay the same."""
    manager: Manager = setting(
        "kvell",
        "--manager",
        "How KV memory is divided; all but kvell are for comparison.",
        choices=MANAGERS,
    )
    """How the pool is shared between layer groups; see :data:`kvell.memory.Manager`."""
    common_pool: bool = False
    """Whether prefixes that several requests share may be protected."""
    embeddings: Embeddings = "own"
    """Where embeddings of image tokens wait: ``own`` pages, or ``in-kv``, the pages that their keys
    and values will overwrite (if there is room in them)."""
    memory_parts: int = 1
    """Instances that start at once on this machine; each may have this part of what is free."""
    pool_place: Rendezvous | None = None
    """Where the engine meets other instances, from which requests come or to which they go; None:
    nowhere."""
    copies_under_pass: bool | None = None
    """Whether pages are copied to the CPU buffer and back while a pass computes; None: where the
    pass leaves a processor free."""

    @property
    def has_objectives(self) -> bool:
        """Whether a latency objective is given."""
        return self.slo_ttft_seconds is not None or self.slo_tpot_seconds is not None

    @property
    def max_step_logits(self) -> int:
        """Most rows of logits of a step."""
        return self.max_num_seqs + max_step_draft_tokens(
            self.max_num_seqs, self.num_speculative_tokens
        )
