"""What an engine is made with, by the names of the flags."""

from dataclasses import dataclass

from kvell.engine.requests.limits import max_step_draft_tokens
from kvell.memory import Embeddings, Manager


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is made with; the names are the flags'.

    :param memory_bytes: of weights, KV cache and activations together; None bounds KV alone.
    :param cpu_buffer_bytes: of the host's memory, for pages of preempted requests; None for none.
    :param slo_ttft_seconds: to a request's first token, at most; with either of these, prompts go
        ahead of decodes, as far into the CPU buffer as lateness says. None asks nothing.
    :param slo_tpot_seconds: for each further token on average, at most.
    :param async_scheduling: plan a step while the one before runs, where that can be.
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

    @property
    def has_objectives(self) -> bool:
        """Is anybody ever late?"""
        return self.slo_ttft_seconds is not None or self.slo_tpot_seconds is not None

    @property
    def max_step_logits(self) -> int:
        """Rows of logits that a step has at most."""
        return self.max_num_seqs + max_step_draft_tokens(
            self.max_num_seqs, self.num_speculative_tokens
        )
