"""Settings of an engine for a loaded model, and their flags.

Command-line flags, arguments of :class:`kvell.LLM` and :class:`kvell.AsyncEngine`, and command
lines of instances are all derived from these fields: a new setting is one field.
"""

from dataclasses import dataclass
from typing import get_args

from kvell.engine.requests.limits import max_step_draft_tokens
from kvell.flags import setting
from kvell.memory import EVICTIONS, Embeddings, Eviction, Manager
from kvell.mempool.rendezvous import Rendezvous
from kvell.pages.sizing import MANAGERS


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings of an engine for a loaded model."""

    memory_bytes: int | None = setting(
        None,
        "--memory",
        "Memory of weights, KV cache and activations together; the last two share what is left.",
        "bytes",
    )
    """Memory of weights, KV cache and activations together. With a fused pass, KV cache and
    activations share the memory that the weights leave, by need; otherwise a part of it is reserved
    for activations. None limits only the KV cache."""
    kv_memory_bytes: int | None = setting(
        None,
        "--kv-memory",
        "Memory of the KV pool, like 512MiB or 24GB. [default: a quarter of what is free]",
        "bytes",
    )
    """Size of the KV pool; with ``memory_bytes``, the KV's initial share."""
    gpu_memory_utilization: float | None = setting(
        None,
        "--gpu-memory-utilization",
        "Share of the free memory, 0 to 1, for weights, activations and KV pool, if no size is "
        "given.",
        "number",
        least=0.0,
        most=1.0,
    )
    """Share of the memory that was free before the weights were loaded, for weights, activations
    and the KV pool, whose size follows from it. Without effect if ``memory_bytes`` or
    ``kv_memory_bytes`` is given."""
    cpu_buffer_bytes: int | None = setting(
        None,
        "--cpu-buffer",
        "Host memory for cached prefixes and preempted requests. [default: none]",
        "bytes",
    )
    """Additional host memory for cached prefixes, and for pages of preempted requests if that is
    faster than recomputing their tokens; None for no buffer."""
    slo_ttft_seconds: float | None = setting(
        None,
        "--slo-ttft",
        "Objective for the first token. While it is missed, prompts run first, and running "
        "requests wait in the CPU buffer.",
        "seconds",
    )
    """Time limit of a request's first token. With either objective, prompts run before decodes,
    whose pages wait in the CPU buffer: more of it is used while first tokens are late, less while
    answers are slow. None sets no limit."""
    slo_tpot_seconds: float | None = setting(
        None,
        "--slo-tpot",
        "Objective for each further token. While it is missed, prompts do not run first.",
        "seconds",
    )
    """Time limit of each further token of an answer, on average."""
    max_model_len: int | None = setting(
        None, "--max-model-len", "Maximum prompt and output tokens of one request.", "length"
    )
    """Most tokens of a request, prompt and answer together. None: as many as the model and the pool
    allow."""
    max_num_batched_tokens: int = setting(
        2048, "--max-num-batched-tokens", "Maximum tokens of one step.", "integer"
    )
    """Most tokens that a step computes, of all requests together."""
    max_num_seqs: int = setting(
        256, "--max-num-seqs", "Maximum number of requests that run together.", "integer"
    )
    """Most requests that run at once."""
    enable_chunked_prefill: bool = setting(
        True,
        "--enable-chunked-prefill",
        "Compute prompts in chunks, together with decodes; else decodes wait for whole prompts.",
        "switch",
    )
    """Cut prompts into chunks that share steps with decodes. Else a step computes whole prompts or
    decodes, prompts first; then ``max_num_batched_tokens`` must be at least ``max_model_len``, or
    limits it if that is None."""
    enable_prefix_caching: bool = setting(
        True,
        "--enable-prefix-caching",
        "Keep the pages of ended requests, for prompts that begin alike.",
        "switch",
    )
    """Share the pages of equal prefixes between requests, also of ended ones. Else each request
    computes its whole prompt, and only a preempted request reuses pages: its own."""
    num_speculative_tokens: int = setting(
        0,
        "--num-speculative-tokens",
        "Maximum draft tokens of a request per step; answers stay the same.",
        "integer",
        least=0,
    )
    """Draft tokens of a request per step, at most. Answers stay the same."""
    prompt_lookup_max: int = setting(
        5,
        "--prompt-lookup-max",
        "Longest end of the text to look up for draft tokens.",
        "integer",
    )
    """Most tokens that are looked up for draft tokens."""
    prompt_lookup_min: int = setting(
        2, "--prompt-lookup-min", "Shortest end of the text to look up.", "integer"
    )
    """Fewest tokens that are looked up for draft tokens."""
    async_scheduling: bool | None = setting(
        None,
        "--async-scheduling",
        "Plan a step while the previous one runs. [default: on a GPU, without --enforce-eager]",
        "switch",
    )
    """Plan a step while the previous one runs; answers stay the same. None: on a GPU that records
    decode steps, which computes a started step by itself; not on a CPU."""
    manager: Manager = setting(
        "kvell",
        "--manager",
        "How KV memory is divided; all but kvell are for comparison.",
        choices=MANAGERS,
    )
    """The division of the pool between layer groups; see :data:`kvell.memory.Manager`."""
    common_pool: bool = setting(
        False,
        "--common-pool",
        "Protect prefixes that several requests share.",
        "switch",
    )
    """Protect prefixes that several requests share from eviction, in a part of the pool that the
    traffic decides."""
    eviction: Eviction = setting(
        "lru",
        "--eviction",
        "Prefixes to evict first: the least recently used, or those least likely to return.",
        choices=EVICTIONS,
    )
    """The cached prefixes that are evicted first: ``lru``, the least recently used; ``hazard``,
    those that are least likely to be used again, as far as the traffic has shown."""
    embeddings: Embeddings = setting(
        "own",
        "--embeddings",
        "Pages of image embeddings: their own, or those that the tokens' KV overwrites.",
        choices=get_args(Embeddings),
    )
    """The pages of image embeddings: ``own`` pages, or ``in-kv``, the pages that the tokens' keys
    and values will overwrite (if they have room)."""
    memory_parts: int = 1
    """Number of instances that start together on this machine and divide its free memory."""
    pool_place: Rendezvous | None = None
    """The rendezvous with other instances, to and from which requests move; None: no others."""
    copies_under_pass: bool | None = None
    """Whether pages are copied to the CPU buffer and back during a pass; None: if the pass leaves a
    processor free."""

    @property
    def has_objectives(self) -> bool:
        """Whether a latency objective is given."""
        return self.slo_ttft_seconds is not None or self.slo_tpot_seconds is not None

    @property
    def max_step_logits(self) -> int:
        """The most rows of logits of a step."""
        return self.max_num_seqs + max_step_draft_tokens(
            self.max_num_seqs, self.num_speculative_tokens
        )
