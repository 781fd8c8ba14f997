"""The options of an engine, named like the flags."""

from dataclasses import dataclass

from kvell.engine.requests.limits import max_step_draft_tokens
from kvell.memory import Embeddings, Manager
from kvell.mempool.rendezvous import Rendezvous


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine, named like the flags.

    :param memory_bytes: of weights, KV cache and activations together; None bounds KV alone.
    :param cpu_buffer_bytes: host memory for pages of preempted requests and cached prefixes; None
        for none.
    :param slo_ttft_seconds: longest time to a request's first token; None: no objective.  With
        either objective, prompts may go ahead of decodes, which are parked in the CPU buffer;
        lateness sets how much of it they may use.
    :param slo_tpot_seconds: longest mean time per further token.
    :param enable_chunked_prefill: cut prompts into chunks that share steps with decodes; else a
        step computes whole prompts or decodes (:mod:`kvell.engine.planning.whole_prompts`).
    :param async_scheduling: plan a step while the one before runs, where that is possible.
    :param memory_parts: instances that start at once on this machine; each may have this part of
        what is free.
    :param pool_place: where it meets other instances that requests come from or go to; None:
        nowhere.
    :param copies_under_pass: whether pages are copied to the CPU buffer and back while a pass
        computes; None: where the pass leaves a processor free.
    :param embeddings: where embeddings of image tokens wait: ``own`` pages, or ``in-kv``, the
        pages that their keys and values will overwrite (if there is room in them).
    """

    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    manager: Manager = "kvell"
    common_pool: bool = False
    num_speculative_tokens: int = 0
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    embeddings: Embeddings = "own"
    memory_bytes: int | None = None
    cpu_buffer_bytes: int | None = None
    async_scheduling: bool = False
    slo_ttft_seconds: float | None = None
    slo_tpot_seconds: float | None = None
    memory_parts: int = 1
    pool_place: Rendezvous | None = None
    enable_chunked_prefill: bool = True
    copies_under_pass: bool | None = None

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
